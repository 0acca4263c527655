"""The wire that compresses: exact for what is kept dense and during warm-up, approximate for the rest.

Everything goes through one lane and one group of its own, in one order. What is lost is fed back. A step whose sum is
not finite reaches all ranks as such, so that all skip it alike, and leaves no trace in what is fed back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hf_parallel.compat.private_collectives import reduce_scatter_flat
from hf_parallel.data_parallel.compression.exchange import CompressedAllReduce, HierarchicalAllReduce, Meter
from hf_parallel.data_parallel.compression.feedback import ErrorFeedback, Layout
from hf_parallel.data_parallel.compression.lane import Job, Lane
from hf_parallel.data_parallel.compression.powersgd import PowerSGD


@dataclass(slots=True)
class Counters:
    """Collectives started, and the bytes of the buffers that they summed, before compression."""

    collectives: int = 0
    bytes: int = 0


@dataclass
class CompressedWire:
    """Sums flat gradient buffers over a group; see `data_parallel.wire.Wire` for the interface.

    Args:
        group: The ranks; a group of their own.
        lane: Thread or stream that does the work.
        method: The codec; None in the exact part of a hierarchy.
        keeps_dense: Name and shape of a parameter -> whether its gradient is sent as it is.
        feedback: Keeps what was left out; None to lose it.
        meter: Meter of `method`.
        loss_scale: Factor that gradients have now (fp16); residuals are kept without it.
    """

    group: dist.ProcessGroup
    lane: Lane
    method: CompressedAllReduce | HierarchicalAllReduce | PowerSGD
    keeps_dense: Callable[[str, torch.Size], bool]
    feedback: ErrorFeedback | None
    meter: Meter
    loss_scale: Callable[[], Tensor | None] = lambda: None
    warm: bool = True
    lossy: bool = True
    counters: Counters = field(default_factory=Counters)
    _reported: tuple[int, int, float] = (0, 0, 0.0)
    _exact: HierarchicalAllReduce | None = field(init=False)

    def __post_init__(self) -> None:
        method = self.method
        self._exact = method.exact() if isinstance(method, HierarchicalAllReduce) else None

    def all_reduce(self, flat: Tensor, bucket: Layout | None) -> Callable[[], None]:
        """Begin to replace `flat` by its sum over the ranks."""
        return self.lane.submit(self.job(flat, bucket))

    def job(self, flat: Tensor, bucket: Layout | None) -> Job:
        """The job that `all_reduce` submits to the lane."""
        self.counters.collectives += 1
        self.counters.bytes += flat.nbytes
        ranks = self.group.size()
        self.meter.dense_bytes += 2 * (ranks - 1) * flat.nbytes // ranks
        if bucket is None:
            return self._dense(flat)
        if not self.warm or self._is_dense(bucket):
            return self._dense(flat) if self._exact is None else self._dense_hierarchical(flat, self._exact)
        if isinstance(self.method, PowerSGD):
            return self.meter.timed(self._low_rank(flat, bucket, self.method))
        if isinstance(self.method, HierarchicalAllReduce):
            return self.meter.timed(self._hierarchical(flat, bucket, self.method))
        return self.meter.timed(self._compressed(flat, bucket, self.method))

    def reduce_scatter(self, flat: Tensor, bucket: Layout) -> tuple[Tensor, Callable[[], None]]:
        """Begin to sum `flat` over the ranks; each keeps its part. Nothing is fed back."""
        self.counters.collectives += 1
        self.counters.bytes += flat.nbytes
        ranks = self.group.size()
        self.meter.dense_bytes += (ranks - 1) * flat.nbytes // ranks
        mine = flat.new_empty(flat.numel() // ranks)
        if not self.warm or self._is_dense(bucket) or not isinstance(self.method, CompressedAllReduce):
            return mine, self.lane.submit(self._dense_part(flat, mine))
        return mine, self.lane.submit(self.meter.timed(self._compressed_part(flat, mine, self.method)))

    def flush(self) -> None:
        """Finish what waits for a successor."""
        self.lane.flush()

    def _is_dense(self, bucket: Layout) -> bool:
        """Whether a bucket is sent as it is; buckets hold one kind only."""
        return self.keeps_dense(bucket.names[0], bucket.shapes[0])

    def _dense(self, flat: Tensor) -> Job:
        ranks = self.group.size()
        self.meter.wire_bytes += 2 * (ranks - 1) * flat.nbytes // ranks
        yield dist.all_reduce(flat, group=self.group, async_op=True)

    def _dense_hierarchical(self, flat: Tensor, method: HierarchicalAllReduce) -> Job:
        """A ring over all ranks would send up to twice as much between nodes."""
        whole = F.pad(flat, (0, -flat.numel() % method.multiple))
        total = yield from method.total(whole, None, lambda part: part)
        flat.copy_(total[: flat.numel()])

    def _dense_part(self, flat: Tensor, mine: Tensor) -> Job:
        ranks = self.group.size()
        self.meter.wire_bytes += (ranks - 1) * flat.nbytes // ranks
        yield reduce_scatter_flat(mine, flat, self.group)

    def _compressed_part(self, flat: Tensor, mine: Tensor, method: CompressedAllReduce) -> Job:
        """Each part is padded to whole blocks by itself, so that codes can be cut where parts end."""
        rows = flat.float().view(method.ranks, -1)
        padded = F.pad(rows, (0, -rows.shape[1] % method.codec.block)).contiguous()
        total = yield from method.part_of(padded.view(-1))
        mine.copy_(total[: mine.numel()])

    def _compressed(self, flat: Tensor, bucket: Layout, method: CompressedAllReduce) -> Job:
        mine = F.pad(flat.float(), (0, -flat.numel() % method.multiple))
        residual = self._residual(bucket, 0, mine.numel(), flat.device)
        mine, error = self._fed(mine, residual), None if residual is None else torch.empty_like(mine)
        total = yield from method.total(mine, error)
        if error is not None:
            error[flat.numel() :] = 0.0  # padding owes nothing
        self._keep(residual, error, total)
        flat.copy_(total[: flat.numel()])

    def _hierarchical(self, flat: Tensor, bucket: Layout, method: HierarchicalAllReduce) -> Job:
        whole = F.pad(flat.float(), (0, -flat.numel() % method.multiple))
        start, length = method.span(whole.numel())
        residual = None if method.between is None else self._residual(bucket, start, length, flat.device)
        error = None if residual is None else whole.new_empty(length)
        total = yield from method.total(whole, error, lambda part: self._fed(part, residual))
        if error is not None:
            error[max(0, flat.numel() - start) :] = 0.0
        self._keep(residual, error, total)
        flat.copy_(total[: flat.numel()])

    def _low_rank(self, flat: Tensor, bucket: Layout, method: PowerSGD) -> Job:
        mine = flat.float()
        residual = self._residual(bucket, 0, mine.numel(), flat.device)
        mine = self._fed(mine, residual)
        total = yield from method.total(mine, bucket)
        error = None if residual is None else torch.sub(mine, total, alpha=1.0 / self.group.size())
        self._keep(residual, error, total)
        flat.copy_(total)

    def _residual(self, bucket: Layout, start: int, length: int, device: torch.device) -> Tensor | None:
        return None if self.feedback is None else self.feedback.residual(bucket, start, length, device)

    def _fed(self, mine: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return mine
        scale = self.loss_scale()
        return mine + (residual if scale is None else residual * scale)

    def _keep(self, residual: Tensor | None, error: Tensor | None, total: Tensor) -> None:
        """Keep the error, unless the sum is not finite: on every rank alike, and without waiting for the device."""
        finite = torch.isfinite(total.sum())
        skipped = (~finite).to(torch.int64)
        self.meter.skipped = skipped if self.meter.skipped is None else self.meter.skipped + skipped
        if residual is not None and error is not None:
            scale = self.loss_scale()
            fresh = (error if scale is None else error / scale).to(residual.dtype)
            residual.copy_(torch.where(finite, fresh, residual))

    def report(self) -> dict[str, float]:
        """Measurements of the wire since the last report, for the logs; waits for the device.

        Returns:
            `compression/ratio` (dense bytes over sent bytes), `compression/wire_mb` (MB sent by this rank),
            `compression/codec_ms` and `compression/residual_norm` (of this rank).
        """
        now = (self.meter.dense_bytes, self.meter.wire_bytes, self.meter.codec_seconds)
        dense, sent, seconds = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        return {
            "compression/ratio": round(dense / sent, 3) if sent else 1.0,
            "compression/wire_mb": round(sent / 1e6, 6),
            "compression/codec_ms": round(seconds * 1e3, 3),
            "compression/residual_norm": self.feedback.norm() if self.feedback is not None else 0.0,
        }

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """State for a checkpoint: residuals, and the thin matrices of PowerSGD, by parameter name."""
        found: dict[str, Mapping[str, Tensor]] = {}
        if self.feedback is not None:
            found["residual"] = self.feedback.state()
        if isinstance(self.method, PowerSGD):
            found["right"] = self.method.state()
        return found

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take up what `state` gave."""
        if self.feedback is not None:
            self.feedback.load(state["residual"])
        if isinstance(self.method, PowerSGD):
            self.method.load(state["right"])
