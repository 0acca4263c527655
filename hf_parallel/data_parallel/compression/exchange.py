"""True compressed sums over a group: only codes travel, sums are made in fp32.

`all_gather`: every rank sends its code to all, N - 1 codes a rank. `reduce_scatter`: each rank gets the codes of its
part, sums them, and sends the code of the sum to all: 2 (N - 1) / N codes a rank, with a second error, which the owner
of the part keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from time import thread_time
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.compat.private_collectives import Pending, all_gather_flat, reduce_scatter_flat
from hf_parallel.data_parallel.compression.codecs import GradientCompressor


Schedule: TypeAlias = Literal["all_gather", "reduce_scatter"]
Steps: TypeAlias = Generator[Pending | None, None, Tensor]
T = TypeVar("T")


@dataclass(slots=True)
class Meter:
    """Counts what went through a wire since it was made.

    Attributes:
        wire_bytes: Sent by this rank, by the formulas of the collectives.
        dense_bytes: Bytes that a ring all-reduce (or reduce-scatter) in the gradients' own dtype would have sent.
        codec_seconds: CPU time of encoding, decoding and feeding back; on CUDA, of launching it.
        skipped: Buckets with values that were not finite, whose residuals stayed as they were.
    """

    wire_bytes: int = 0
    dense_bytes: int = 0
    codec_seconds: float = 0.0
    skipped: Tensor | None = field(default=None)

    def timed(self, steps: Generator[Pending | None, None, T]) -> Generator[Pending | None, None, T]:
        """The same steps; what they take between their waits is counted."""
        while True:
            start = thread_time()
            try:
                work = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.codec_seconds += thread_time() - start
            yield work


class CompressedAllReduce:
    """Sums vectors over a group through a codec.

    Args:
        codec: The codec.
        group: The ranks; this object is used by one thread at a time.
        schedule: Collectives by which codes are exchanged.
        meter: Counts.
    """

    def __init__(self, codec: GradientCompressor, group: dist.ProcessGroup, schedule: Schedule, meter: Meter) -> None:
        self.codec, self.group, self.schedule, self.meter = codec, group, schedule, meter
        self.ranks = group.size()

    @property
    def multiple(self) -> int:
        """Number that the length of a vector must be divisible by."""
        return self.codec.block * (self.ranks if self.schedule == "reduce_scatter" else 1)

    def total(self, mine: Tensor, error: Tensor | None) -> Steps:
        """Steps to the sum of the ranks' vectors, f32[n], which all ranks get bit for bit alike.

        Args:
            mine: f32[n], this rank's, n a multiple of `multiple`.
            error: f32[n], overwritten with what this rank's messages left out; None if nobody asks.
        """
        payload = self._encode(mine, error)
        if self.schedule == "reduce_scatter":
            shard = yield from self._part(payload)
            begin = self.group.rank() * shard.numel()
            second = None if error is None else torch.empty_like(shard)
            payload = self._encode(shard, second)
            if error is not None and second is not None:
                error[begin : begin + shard.numel()] += second
        everyone = payload.new_empty(self.ranks * payload.numel())
        work = all_gather_flat(everyone, payload, self.group)
        self.meter.wire_bytes += (self.ranks - 1) * payload.numel()
        yield work
        decoded = self.codec.decode(everyone)
        return decoded if self.schedule == "reduce_scatter" else decoded.view(self.ranks, -1).sum(0)

    def part_of(self, mine: Tensor) -> Steps:
        """Steps to this rank's part, f32[n / N], of the sum of the ranks' vectors f32[n]; nothing is fed back."""
        return (yield from self._part(self.codec.encode(mine)))

    def _part(self, payload: Tensor) -> Steps:
        received = torch.empty_like(payload)
        work = dist.all_to_all_single(received, payload, group=self.group, async_op=True)
        self.meter.wire_bytes += (self.ranks - 1) * payload.numel() // self.ranks
        yield work
        return self.codec.decode(received).view(self.ranks, -1).sum(0)

    def _encode(self, x: Tensor, error: Tensor | None) -> Tensor:
        payload = self.codec.encode(x)
        if error is not None:
            torch.sub(x, self.codec.decode(payload), out=error)
        return payload


class HierarchicalAllReduce:
    """Exact sums inside a node, compressed ones between nodes: each rank compresses its part of the node's sum.

    Args:
        inside: The ranks of this rank's node.
        between: Sums over the ranks with the same place in other nodes; None for exact sums there too.
        across: The ranks with the same place in other nodes.
        meter: Counts the bytes between nodes.
    """

    def __init__(
        self,
        inside: dist.ProcessGroup,
        across: dist.ProcessGroup,
        between: CompressedAllReduce | None,
        meter: Meter,
    ) -> None:
        self.inside, self.across, self.between, self.meter = inside, across, between, meter

    def exact(self) -> HierarchicalAllReduce:
        """The same without compression."""
        return HierarchicalAllReduce(self.inside, self.across, None, self.meter)

    @property
    def multiple(self) -> int:
        """Number that the length of a vector must be divisible by."""
        return self.inside.size() * (self.between.multiple if self.between is not None else 1)

    def span(self, length: int) -> tuple[int, int]:
        """First element and number of elements of this rank's part of a vector of `length`."""
        part = length // self.inside.size()
        return self.inside.rank() * part, part

    def total(self, whole: Tensor, error: Tensor | None, residual: Callable[[Tensor], Tensor]) -> Steps:
        """Steps to the sum of the ranks' vectors, f32[n]; any dtype without compression.

        Args:
            whole: f32[n], this rank's.
            error: f32[n / ranks of the node], as in `CompressedAllReduce.total`, of the part that this rank compresses.
            residual: Adds what was left out before to that part, and returns it.
        """
        mine = whole.new_empty(whole.numel() // self.inside.size())
        yield reduce_scatter_flat(mine, whole, self.inside)
        mine = residual(mine)
        if self.between is not None:
            mine = yield from self.between.total(mine, error)
        else:
            self.meter.wire_bytes += 2 * (self.across.size() - 1) * mine.nbytes // self.across.size()
            yield dist.all_reduce(mine, group=self.across, async_op=True)
        total = torch.empty_like(whole)
        yield all_gather_flat(total, mine.contiguous(), self.inside)
        return total
