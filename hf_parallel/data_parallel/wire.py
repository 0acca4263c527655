"""The interface of collectives that sum flat buffers, exact or compressed; the gradient reduction and ZeRO use nothing else.

A wire is used by one group of ranks, which call it with the same buckets in the same order. It only sums; the caller
multiplies the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.private_collectives import Pending, reduce_scatter_flat
from hf_parallel.data_parallel.buckets import BUCKET_BYTES, Bucket
from hf_parallel.data_parallel.buffer_pool import BufferPool
from hf_parallel.errors import UnsupportedError
from hf_parallel.monitor.recorder import Recorder, silent


Wait: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class WireCounters:
    """Since the wire was made: collectives started, bytes of the buffers that they reduced or gathered."""

    collectives: int = 0
    bytes: int = 0


class Counts(Protocol):
    """Since a wire was made: collectives started, bytes of the buffers that they summed."""

    collectives: int
    bytes: int


class Wire(Protocol):
    """Sums flat buffers over a group of ranks.

    Attributes:
        lossy: Whether the sum is an approximation that feeds errors back. Buffers must then come with their final
            factor already applied, because what is fed back must be in the units of the result.
        counters: Collectives and bytes so far.
    """

    lossy: bool

    @property
    def counters(self) -> Counts:
        """Collectives and bytes of this wire so far."""
        ...

    def all_reduce(self, flat: Tensor, bucket: Bucket | None) -> Wait:
        """Begin to replace `flat` by its sum over the ranks; the function that is returned waits until it is.

        Args:
            flat: f[n], n >= bucket.numel.
            bucket: Bucket of the gradients; None for a few numbers that must arrive as they are.
        """
        ...

    def reduce_scatter(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Wait]:
        """Begin to sum `flat` over the ranks; each keeps its own part.

        Args:
            flat: f[bucket.numel], divisible by the number of ranks; it may be overwritten.

        Returns:
            f[bucket.numel / N], filled when the second item, a function that waits, returns.
        """
        ...

    def flush(self) -> None:
        """Start the collectives that are still delayed; no more buffers follow before the waits."""
        ...


class Compared(Protocol):
    """Bits that ranks compare beside the gradients that they sum: the same on all of them, or something is wrong."""

    num_bits: int

    def bits(self) -> Tensor:
        """Return zeros and ones of this rank, f[num_bits]."""
        ...

    def judge(self, sums: Tensor) -> None:
        """Judge the sums of the bits over the ranks, f[num_bits]; all ranks call it alike."""
        ...

    def updated(self) -> None:
        """Look at what an optimizer has just updated."""
        ...

    def compare(self) -> None:
        """Compare it now, without gradients; collective over the ranks."""
        ...


Comparing: TypeAlias = Callable[[Sequence[tuple[str, nn.Parameter]], dist.ProcessGroup], Compared]


@dataclass(frozen=True)
class Traffic:
    """Settings of the reduction of gradients over the replicas: buckets, wire, precision, and who waits for what.

    Args:
        bucket_bytes: Size at which a bucket is closed, at least 1.
        kind: Parameters of different kinds do not share a bucket.
        late: Whether the buckets of a kind must not be started before the reduction is asked for.
        overlaps: Start buckets during backward passes that are announced.
        wire: Sums the buckets; None for exact sums.
        sharers: Name of a parameter -> the ranks that share its gradient and its update with this one, None for nobody; those
            of one kind have the same. None: all ranks do.
        waiting: Context for waits on other ranks outside of a reduction.
        dtype: Dtype of the sums; gradients of wider parameters keep theirs.
        recorder: Keeps when buckets were under way.
        noticed: Called when a gradient has arrived at a parameter, in whichever backward pass; None: nobody asks.
        compared: Given names and parameters and the ranks that sum their gradients, what these compare; None: nothing.
    """

    bucket_bytes: int = BUCKET_BYTES
    kind: Callable[[str, nn.Parameter], Hashable] = lambda name, param: None
    late: Callable[[Hashable], bool] = lambda kind: False
    overlaps: bool = False
    wire: Wire | None = None
    sharers: Callable[[str], dist.ProcessGroup | None] | None = None
    waiting: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext()
    dtype: torch.dtype = torch.float32
    recorder: Recorder = field(default_factory=silent)
    noticed: Callable[[], None] | None = None
    compared: Comparing | None = None


PLAIN = Traffic()


@dataclass(slots=True)
class UnderWay:
    """A bucket whose reduction has started.

    Args:
        sum: Will hold the sum: all of the bucket or this rank's part of it.
        factor: Factor that its gradients were multiplied by.
        present: Whether each of its parameters had a gradient here.
        wait: Waits until it is summed.
        begun: Moment of the recorder at which it started.
        flags: Will hold the number of ranks that had a gradient of each parameter, f[params]; None if nobody asks.
    """

    sum: Tensor
    factor: float
    present: tuple[bool, ...]
    wait: Wait
    begun: Any
    flags: Tensor | None = None

    def arrive(self, index: int, factor: float, recorder: Recorder) -> None:
        """Wait, record that of bucket `index`, and let the sum be one of gradients times `factor`."""
        start = recorder.mark()
        self.wait()
        recorder.add("wait reduce", index, -1, start)
        recorder.add("reduce", index, -1, self.begun)
        if factor != self.factor:
            self.sum.mul_(factor / self.factor)

    def anywhere(self) -> Sequence[bool]:
        """Whether each parameter has a gradient on some rank.

        Reading waits for the device: only a rank that lacks one asks.
        """
        if all(self.present) or self.flags is None:
            return self.present
        return [count > 0.0 for count in self.flags.tolist()]


def announced_factor(wire: Wire, factor: float | None) -> float | None:
    """The factor of gradients that move into their bucket before the reduction; None if they must wait for it.

    Args:
        wire: Sends them.
        factor: Factor of the reduction; None if it is not known.
    """
    if wire.lossy:
        return factor
    return factor or 1.0  # another one may follow, which could not be made of zeros


def require_announced(wire: Wire, announced: float, factor: float, *, left: bool) -> None:
    """Refuse a factor other than the announced one: a lossy wire has already sent buffers multiplied by that.

    Args:
        wire: Sends them.
        announced: The factor that they were multiplied by.
        factor: Factor of the reduction.
        left: Whether any were sent.

    Raises:
        UnsupportedError: The two factors differ.
    """
    if wire.lossy and left and factor != announced:
        raise UnsupportedError(
            f"gradients were announced with a factor of {announced} and reduced with {factor}: buckets that were "
            "sent before have the first one. Pass the same factor to arm() and to reduce()."
        )


@dataclass
class PlainWire:
    """Exact sums by the collectives of torch.distributed."""

    group: dist.ProcessGroup
    lossy: bool = False
    counters: WireCounters = field(default_factory=WireCounters)
    pool: BufferPool = field(default_factory=lambda: BufferPool(keeps=False))

    def all_reduce(self, flat: Tensor, bucket: Bucket | None) -> Wait:
        """One all-reduce."""
        self._count(flat)
        return _waits_for(dist.all_reduce(flat, group=self.group, async_op=True))

    def reduce_scatter(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Wait]:
        """Run one reduce-scatter."""
        self._count(flat)
        mine = self.pool.empty(flat.numel() // self.group.size(), flat.dtype, flat.device)
        return mine, _waits_for(reduce_scatter_flat(mine, flat, self.group, self.pool.empty))

    def flush(self) -> None:
        """Do nothing: this wire delays nothing."""

    def _count(self, flat: Tensor) -> None:
        self.counters.collectives += 1
        self.counters.bytes += flat.nbytes


def _waits_for(work: Pending | None) -> Wait:
    def wait() -> None:
        if work is not None:
            work.wait()

    return wait
