"""Average gradients over the replicas once per optimizer step, in flat buckets, during the backward pass.

Not DDP: accumulation, pipeline stages that share a parameter, ZeRO and the compressed wire all need the reduction as
one explicit call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.compat.torch_tools import scale_all, sent_to
from hf_parallel.data_parallel.buckets import Packer, lay_out
from hf_parallel.data_parallel.buffer_pool import BufferPool
from hf_parallel.data_parallel.overlap import Overlap
from hf_parallel.data_parallel.wire import (
    PLAIN,
    Counts,
    PlainWire,
    Traffic,
    UnderWay,
    Wait,
    Wire,
    WireCounters,
    announced_factor,
    require_announced,
)


class GradientReducer:
    """Replaces the gradients of fixed parameters by a multiple of their sum over a group, one message a bucket.

    Gradients in bf16 or fp16 are summed in fp32, unless `traffic` says otherwise. A parameter that has a gradient on some
    ranks only counts as zero on the others; one that has none anywhere keeps ``grad = None``, so that the optimizer does
    not decay it. The flags for this are part of the bucket, or a message of their own where the bucket is compressed with
    errors.

    Args:
        params: Names and parameters, in the same order on all ranks. Frozen ones are left out; a parameter that occurs
            twice is reduced once.
        group: The group to sum over; None, or a group of one rank, applies the factor alone.
        traffic: Way in which they are sent.

    Attributes:
        compared: What the ranks of the group compare; None: nothing.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        traffic: Traffic = PLAIN,
    ) -> None:
        self._buckets = lay_out(params, traffic.bucket_bytes, kind=traffic.kind, dtype=traffic.dtype)
        alone = group is None or group.size() == 1
        self._wire: Wire | None = None if alone or group is None else traffic.wire or PlainWire(group)
        overlaps = traffic.overlaps and not alone
        self._pool = BufferPool(keeps=overlaps)  # it cannot see passes that add up without hooks on the parameters
        trained = [(name, p) for bucket in self._buckets for name, p in zip(bucket.names, bucket.params, strict=True)]
        self.compared = (
            traffic.compared(trained, group)
            if traffic.compared is not None and group is not None and not alone and trained
            else None
        )
        self._packer = self._make_packer(lossy=self._wire is not None and self._wire.lossy)
        self._under_way: list[UnderWay] = []
        self._sums: torch.Tensor | None = None  # of what is compared, once all buckets have arrived
        self._recorder = traffic.recorder
        late = frozenset(index for index, bucket in enumerate(self._buckets) if traffic.late(bucket.kind))
        noticed = None if alone else traffic.noticed
        self._overlap = Overlap(
            self._buckets,
            self._start,
            self._packer.arrived,
            late,
            watches=overlaps,
            noticed=noticed,
            early=self._pool.forget,
        )

    def _make_packer(self, *, lossy: bool) -> Packer:
        """Make the packer of the buckets; flags and the compared bits travel in them where they arrive as they are."""
        compared = None if lossy else self.compared
        beside, num_beside = (None, 0) if compared is None else (compared.bits, compared.num_bits)
        return Packer(self._buckets, self._pool, flagged=not lossy, beside=beside, num_beside=num_beside)

    @property
    def counters(self) -> Counts:
        """Messages and bytes so far."""
        return self._wire.counters if self._wire is not None else WireCounters()

    def close(self) -> None:
        """Remove the hooks on the parameters."""
        self._overlap.remove()

    def arm(self, factor: float | None) -> None:
        """Allow full buckets to be reduced in the next backward pass, the last before `reduce`.

        Args:
            factor: Factor that `reduce` will be given; None if that is not known yet, and then an approximating wire waits.
        """
        announced = announced_factor(self._wire, factor) if self._wire is not None else None
        if announced is not None:
            self._packer.factor = announced
            self._overlap.arm()

    @torch.no_grad()
    def reduce(self, factor: float) -> None:
        """Replace every gradient by ``factor`` times its sum over the group; call once per optimizer step.

        Afterwards ``p.grad`` may be a view of a bucket; it stays valid under both forms of ``zero_grad``.

        Raises:
            UnsupportedError: If a gradient is sparse; nothing is sent then. Or buckets left with another factor.
        """
        wire = self._wire
        if wire is None:
            for bucket in self._buckets:
                bucket.refuse_sparse()
            self._scale(factor)
            return
        require_announced(wire, self._packer.factor, factor, left=bool(self._under_way) or self._packer.has_begun)
        self._packer.factor = factor
        self._overlap.finish()
        under_way, self._under_way = self._under_way, []
        counted = self._exchange_flags(wire, under_way) if wire.lossy else None
        wire.flush()
        under_way.reverse()
        for index, bucket in enumerate(self._buckets):
            item = under_way.pop()  # so that its buffer goes as soon as the gradients are copied out of it
            item.arrive(index, factor, self._recorder)
            if not all(item.present) and counted is not None:
                counted()
            bucket.unpack(item.sum, item.anywhere())
        sums, self._sums = self._sums, None  # part of a buffer that serves the next step
        if self.compared is not None and sums is not None:
            if counted is not None:
                counted()
            self.compared.judge(sums)

    @torch.no_grad()
    def _start(self, index: int) -> None:
        wire, bucket = self._wire, self._buckets[index]
        if wire is None:
            return
        begun = self._recorder.mark()
        packed = self._packer.pack(index)
        wait = wire.all_reduce(packed.flat, bucket)
        gradients, flags, beside = packed.flat.tensor_split([bucket.numel, bucket.numel + len(bucket.params)])
        self._under_way.append(UnderWay(gradients, packed.factor, packed.present, wait, begun, flags))
        if index == 0 and self.compared is not None:
            self._sums = beside

    def _exchange_flags(self, wire: Wire, under_way: Sequence[UnderWay]) -> Wait:
        """Begin to count the ranks that had a gradient of each parameter, in a message of its own."""
        present = [float(here) for item in under_way for here in item.present]
        device = self._buckets[0].device if self._buckets else torch.device("cpu")
        counts = sent_to(device, present)
        if self.compared is not None:
            counts = torch.cat([counts, self.compared.bits()])
            self._sums = counts[len(present) :]
        wait = wire.all_reduce(counts, None)
        counts = counts[: len(present)]
        for item, flags in zip(under_way, counts.split([len(item.present) for item in under_way]), strict=True):
            item.flags = flags
        return wait

    def _scale(self, factor: float) -> None:
        grads = [param.grad for bucket in self._buckets for param in bucket.params if param.grad is not None]
        if grads and factor != 1.0:
            scale_all(grads, factor)
