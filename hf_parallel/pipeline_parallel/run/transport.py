"""Messages from one rank of a pipeline to a neighbour: one small interface, two ways to carry the tensors.

A transport carries one direction between two ranks, over a process group of its own. NCCL runs the operations of a
communicator one after another, and an operation ends only once its other end runs. Where a group has one communicator for
all of its ranks (eager initialisation), messages of one pair would wait for those of another, and schedules that both
ranks follow could still deadlock.

`DirectTransport` hands the tensors to the process group (NCCL on CUDA, gloo on CPU). `HostTransport` stages them through
host memory over a gloo group, because gloo's send and receive cannot take CUDA tensors; it lets several ranks share
one GPU, and works on CPU tensors too. Nothing here knows about microbatches or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.errors import UnsupportedError
from hf_parallel.mesh.groups import backend_for


TransportKind: TypeAlias = Literal["auto", "direct", "host"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor for which a receive is posted, and whether a gradient goes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class Message(Protocol):
    """Tensors under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors once they may be read (received) or reused (sent)."""
        ...


class Transport(Protocol):
    """Carries tensors between the two ranks of a process group, in one direction.

    Attributes:
        device: Device of received tensors.
        receive_ahead: Receives that may be posted before their message is needed, at least 0.
        opens_late: Whether the first message opens the connection, and blocks both ranks meanwhile.
    """

    device: torch.device
    receive_ahead: int
    opens_late: bool

    def isend(self, tensors: Sequence[Tensor]) -> Message:
        """Start sending contiguous, detached tensors; returns at once."""
        ...

    def irecv(self, specs: Sequence[TensorSpec]) -> Message:
        """Start receiving tensors of these shapes and dtypes; returns at once."""
        ...


@dataclass(slots=True)
class _DirectMessage:
    works: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class _HostReceive:
    works: list[dist.Work]
    staging: tuple[Tensor, ...]
    device: torch.device

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        # From pinned memory the copy is asynchronous; the pinned allocator keeps the block until the copy is done.
        # On a CPU device the copy is forced, so that the staged path is the same one that CUDA takes.
        return tuple(t.to(self.device, non_blocking=True, copy=True) for t in self.staging)


def _start_sends(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start one send a non-empty tensor; both ends know an empty one from its shape."""
    peer = 1 - dist.get_rank(group)
    works = (dist.isend(tensor, group=group, group_dst=peer) for tensor in tensors if tensor.numel())
    return [work for work in works if work is not None]


def _start_receives(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    peer = 1 - dist.get_rank(group)
    works = (dist.irecv(tensor, group=group, group_src=peer) for tensor in tensors if tensor.numel())
    return [work for work in works if work is not None]


class DirectTransport:
    """The process group takes the tensors as they are: NCCL for CUDA tensors, gloo for CPU tensors.

    gloo's sends are rendezvous: a send may finish only once its receive is posted, so callers post receives ahead and
    never wait for a send just issued. NCCL runs the operations of a communicator in order on a stream of its own; each
    receive that is posted ahead occupies some of the GPU until its message comes, so there is one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self.opens_late = backend_for(group, device.type) == "nccl"
        self.receive_ahead = 1 if self.opens_late else 2

    def isend(self, tensors: Sequence[Tensor]) -> Message:
        """See `Transport.isend`."""
        return _DirectMessage(_start_sends(tensors, self._group), tuple(tensors))

    def irecv(self, specs: Sequence[TensorSpec]) -> Message:
        """See `Transport.irecv`."""
        buffers = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs)
        return _DirectMessage(_start_receives(buffers, self._group), buffers)


class HostTransport:
    """Copies every tensor through host memory (pinned for CUDA) and sends the copy over a gloo group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if backend_for(group, "cpu") != "gloo":
            raise UnsupportedError(
                f"pipeline transport 'host' sends host memory and needs a gloo group, but this group has "
                f"{dist.get_backend_config(group)}. Create the pipeline group with backend gloo or cpu:gloo,cuda:nccl."
            )
        self._group, self.device = group, device
        self.receive_ahead = 2
        self.opens_late = False

    def isend(self, tensors: Sequence[Tensor]) -> Message:
        """See `Transport.isend`."""
        # Pinned on CUDA: a copy from pageable memory would block the host whatever `non_blocking` says.
        staging = tuple(self._buffer(tuple(t.shape), t.dtype).copy_(t, non_blocking=True) for t in tensors)
        if self.device.type == "cuda":
            # gloo reads the staging memory from the CPU: wait for the copies alone, not for the whole device.
            torch.cuda.current_stream(self.device).record_event().synchronize()
        return _DirectMessage(_start_sends(staging, self._group), staging)

    def irecv(self, specs: Sequence[TensorSpec]) -> Message:
        """See `Transport.irecv`."""
        staging = tuple(self._buffer(spec.shape, spec.dtype) for spec in specs)
        return _HostReceive(_start_receives(staging, self._group), staging, self.device)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def make_transport(kind: TransportKind, device: torch.device, group: dist.ProcessGroup) -> Transport:
    """Return the transport for tensors on ``device`` over ``group``.

    Args:
        kind: "direct", "host", or "auto": direct where the group's backend takes tensors of the device, else host.
        device: Device of the stages' tensors.
        group: Group of the two ranks, for this direction alone.

    Raises:
        UnsupportedError: If the group's backend cannot carry the tensors that way.
    """
    takes_device = backend_for(group, device.type) == ("gloo" if device.type == "cpu" else "nccl")
    if kind == "direct" and not takes_device:
        raise UnsupportedError(
            f"pipeline transport 'direct' cannot carry {device.type} tensors over a group with "
            f"{dist.get_backend_config(group)}: CUDA needs NCCL, CPU needs gloo. Use transport 'auto' or 'host'."
        )
    if kind == "direct" or (kind == "auto" and takes_device):
        return DirectTransport(group, device)
    return HostTransport(group, device)


def connect(transport: Transport, *, sends: bool) -> None:
    """Send one element, so that the two ranks have their connection; both call this.

    NCCL opens a communicator at its first message and blocks until both ends arrive; a receive posted ahead would then
    wait for a peer that waits for us. Several connections are opened in one order on all ranks.

    Args:
        transport: The transport to connect.
        sends: Whether this rank is the sending one.
    """
    spec = TensorSpec((1,), torch.int64, False)
    if sends:
        transport.isend([torch.zeros(1, dtype=spec.dtype, device=transport.device)]).wait()
    else:
        transport.irecv([spec]).wait()
