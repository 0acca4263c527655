"""Exchanges parts of a sequence between the ranks that share it, as autograd functions on plain local tensors.

Source: DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): an all-to-all turns parts of the sequence with all heads into
the whole sequence with some heads, and back.

Extents: B batch, S sequence, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.compat.private_collectives import Exchange, all_gather_new
from hf_parallel.mesh.groups import backend_for
from hf_parallel.monitor.recorder import Recorder, silent


Messages: TypeAlias = Sequence[tuple[Tensor, int]]  # with the other rank, counted in the group


@dataclass(frozen=True)
class Passing:
    """Messages that are on their way.

    Args:
        messages: To wait for; None if there are none.
        recorder: Keeps how long this rank waited.
        landed: Pairs of a buffer in host memory that a message fills, and the tensor that it goes to.
    """

    messages: Exchange | None
    recorder: Recorder
    landed: Sequence[tuple[Tensor, Tensor]] = ()

    def wait(self) -> None:
        """Return when all have arrived; on CUDA, the current stream waits."""
        if self.messages is not None:
            with self.recorder.span("sp"):
                self.messages.wait()
        for host, target in self.landed:
            target.copy_(host)


class SequenceGroup:
    """The ranks that share a sequence. All of them call each function.

    Args:
        bare: The process group.
        recorder: Counts bytes, and keeps when they travelled.
    """

    def __init__(self, bare: dist.ProcessGroup, recorder: Recorder | None = None) -> None:
        self.bare, self._recorder = bare, recorder or silent()
        self.size, self.rank = bare.size(), bare.rank()
        self._has_met = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        """A copy of a model communicates over the same group."""
        return self

    def exchange(self, x: Tensor) -> Tensor:
        """Send row i of `x`, f[size n], to rank i; returns the rows that this rank was sent, in rank order."""
        received = torch.empty_like(x)
        with self._recorded(x):
            dist.all_to_all_single(received, x, group=self.bare)
        return received

    def gather(self, x: Tensor) -> list[Tensor]:
        """The ranks' `x`, all of one shape, in rank order; outside autograd."""
        with self._recorded(x):
            everyone = all_gather_new(x, self.bare)
        return list(everyone.unbind())

    def total(self, x: Tensor) -> Tensor:
        """Sum of the ranks' `x` in new memory; outside autograd."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with self._recorded(total):
            dist.all_reduce(total, group=self.bare)
        return total

    def meet(self, device: torch.device) -> None:
        """Make the communicator that messages between two ranks need, once; collective."""
        if not self._has_met:
            dist.all_reduce(torch.zeros(1, device=device), group=self.bare)
            self._has_met = True

    def pass_on(self, sends: Messages, receives: Messages) -> Passing:
        """Begin to send tensors to ranks of the group, and to receive; between two ranks in the order given on both.

        One batch, so that neither side waits for the other to begin. The ranks must have met: a rank that neither sends nor
        receives takes no part.

        Args:
            sends: Tensors, contiguous and left alone until the end, each with the rank that gets it.
            receives: Tensors to be filled, each with the rank that sends it.
        """
        if not (sends or receives):
            return Passing(None, self._recorder)
        for x, _ in sends:
            self._recorder.count("sp", x.nbytes)
        landed = []
        if (sends or receives)[0][0].is_cuda and backend_for(self.bare, "cuda") == "gloo":  # it sends host memory only
            sends = [(x.cpu(), peer) for x, peer in sends]
            landed = [(torch.empty_like(x, device="cpu"), x) for x, _ in receives]
            receives = [(host, peer) for (host, _), (_, peer) in zip(landed, receives, strict=True)]
        return Passing(Exchange(sends, receives, self.bare), self._recorder, landed)

    @contextmanager
    def _recorded(self, given: Tensor) -> Iterator[None]:
        """A collective to which this rank hands a tensor."""
        self._recorder.count("sp", given.nbytes)
        with self._recorder.span("sp"):
            yield


def to_heads(tensors: Sequence[Tensor], group: SequenceGroup) -> list[Tensor]:
    """Parts of a sequence with all heads become the whole sequence with this rank's heads: one message each way.

    Args:
        tensors: Each f[B H S/sp D], with its own H, which the ranks divide, and D.
        group: The ranks that share the sequence.

    Returns:
        Each f[B H/sp S D].
    """
    size = group.size
    sent = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in tensors]  # (sp, batch, heads / sp, seq / sp, width)
    received = _exchanged([x.reshape(size, -1) for x in sent], group)
    return [
        part.view(x.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)  # (batch, heads / sp, seq, width)
        for part, x in zip(received, sent, strict=True)
    ]


def to_sequence(x: Tensor, group: SequenceGroup) -> Tensor:
    """The whole sequence with this rank's heads becomes its part of the sequence with all heads.

    Args:
        x: f[B S H/sp D].
        group: The ranks that share the sequence.

    Returns:
        f[B S/sp H D].
    """
    sent = x.unflatten(1, (group.size, -1)).movedim(1, 0)  # (sp, batch, seq / sp, heads / sp, width)
    received = _exchanged([sent.reshape(group.size, -1)], group)[0].view(sent.shape)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (batch, seq / sp, heads, width)


def _exchanged(rows: Sequence[Tensor], group: SequenceGroup) -> Sequence[Tensor]:
    """Exchange several tensors f[sp n] in one message."""
    together = rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=1)
    received: Tensor = _Exchange.apply(together.contiguous(), group)  # type: ignore[no-untyped-call]
    parts: Sequence[Tensor] = received.split([row.shape[1] for row in rows], dim=1)
    return parts


def summed(x: Tensor, group: SequenceGroup) -> Tensor:
    """Sum of the ranks' `x`. The gradient of each rank's share is `size` times that of the sum: gradients are averaged over the ranks.

    What a loss adds past the model (a penalty on parameters) has its gradient on every rank, so a sum would count it several times.
    """
    result: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gathered(x: Tensor, group: SequenceGroup, length: int) -> Tensor:
    """The whole sequence, f[B S ...], of the ranks' parts, f[B S/sp ...]; `length` cuts off what was filled up.

    Its gradient must be the same on all ranks; each takes the part of its own tokens, `size` times as `summed` does.
    """
    result: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return result[:, :length].contiguous()  # as a model's own, of which code of users makes views


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.exchange(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.exchange(grads[0].contiguous()), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.size = group.size
        return group.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        return torch.cat(group.gather(x), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        return grads[0].narrow(1, group.rank * ctx.length, ctx.length) * group.size, None


def repeats_for(kv_heads: int, size: int) -> int:
    """Count how often to repeat key-value heads so that `size` ranks divide them and each finds its own beside its queries.

    Args:
        kv_heads: Key-value heads.
        size: Ranks.
    """
    return math.lcm(kv_heads, size) // kv_heads
