"""ZeRO stages 1 and 2 on plain torch: every rank of a group updates its part of flat parameter buffers.

The optimizer object stays the user's own. Its parameter groups get, in place of the model's parameters, one flat
tensor a bucket: this rank's part, in fp32. `step()` updates it, and a hook after the step gathers the updated
parameters, which are views of the flat buffers. So any optimizer that updates every element independently works unchanged,
with its groups, schedulers and hooks.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5: P_os (stage 1) and P_os+g (stage 2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_parallel.compat.private_collectives import all_gather_flat
from hf_parallel.compat.torch_tools import sent_to
from hf_parallel.data_parallel.buckets import Bucket, Packer, lay_out
from hf_parallel.data_parallel.buffer_pool import BufferPool
from hf_parallel.data_parallel.flat import (
    ALIGN,
    FlatKind,
    FlatShard,
    counted_pieces,
    fingerprint,
    flatten,
    refuse_overlaps,
)
from hf_parallel.data_parallel.flat_optimizer import group_of_parameters, per_element, take_over
from hf_parallel.data_parallel.host import FusedOnHost, HostMemory
from hf_parallel.data_parallel.late_gather import LateGather
from hf_parallel.data_parallel.overlap import Overlap
from hf_parallel.data_parallel.shared_counts import SharedCounts
from hf_parallel.data_parallel.wire import (
    PLAIN,
    PlainWire,
    Traffic,
    UnderWay,
    Wait,
    Wire,
    announced_factor,
    require_announced,
)


class ZeroPartition:
    """The gradients and the optimizer of the parameters that a group of ranks updates together.

    Args:
        optimizer: Optimizer, whose parameters are taken over; changed in place.
        params: Names and parameters of the model, in the same order on all ranks.
        shard_group: Ranks that share one copy of the optimizer state; at least two.
        replicate_group: Ranks with the same part in other copies; None if there is one copy.
        stage: 1 or 2: whether gradients are kept whole between the backward passes of one step.
        traffic: Way in which gradients are sent over `shard_group`.
        counted: Name and parameter -> which elements this rank counts in the norm: all, none or a mask b[...] in the
            parameter's shape.
        host: Host memory for this rank's part, its gradient and its optimizer state; None: on the parameters' device.

    Attributes:
        shards: The flat buffers.
        groups: Names of the parameters in each group of the optimizer, in the user's order.
        late: Gathers updated parameters during the next forward; None: they are gathered when the step returns.
        copies: Sums this rank's part over the copies of the optimizer state; None if there is one copy.
        gathered_bytes: Bytes of updated parameters that this rank handed to gathers so far.
        absent_names: Names of parameters that have no gradient on any rank.
        counts: Knows which parameters took fewer steps than their part counts.
        drops: A digest of the gradients that user code has dropped before steps until now; the same on all ranks of a part.

    Raises:
        UnsupportedError: If a parameter is in two groups, or two parameters share memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[tuple[str, nn.Parameter]],
        shard_group: dist.ProcessGroup,
        replicate_group: dist.ProcessGroup | None = None,
        *,
        stage: int = 1,
        traffic: Traffic = PLAIN,
        counted: Callable[[str, nn.Parameter], bool | Tensor] = lambda name, param: True,
        host: HostMemory | None = None,
    ) -> None:
        self.stage, self.optimizer, self.host = stage, optimizer, host
        self.shard_group, self.replicate_group = shard_group, replicate_group
        # Stage 2 is for those who have no room for whole gradients; and without hooks, passes that add up would not be seen.
        self._pool = BufferPool(keeps=stage == 1 and traffic.overlaps)
        self.wire: Wire = traffic.wire or PlainWire(shard_group, pool=self._pool)
        self.copies = PlainWire(replicate_group) if replicate_group is not None else None
        self._waiting, self._recorder = traffic.waiting, traffic.recorder
        self.gathered_bytes = 0
        index_of = group_of_parameters(optimizer)
        names = {id(param): name for name, param in params}
        self.groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        taken = [(name, param) for name, param in params if id(param) in index_of]
        refuse_overlaps(taken)
        self._buckets = _buckets_of(taken, index_of, traffic, shard_group.size())
        self.shards = self._flat_parts(traffic, counted)
        self.counts = SharedCounts(optimizer, stage)
        for shard, names_of_it in take_over(optimizer, self.shards):
            self.counts.begin(shard, names_of_it)
        on_host = any(shard.master.device.type == "cpu" for shard in self.shards)
        self._kernel = FusedOnHost(optimizer) if on_host else None
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._packer = Packer(self._buckets, self._pool, flagged=False)
        self._under_way: list[UnderWay] = []
        self._overlap = self._overlap_of(traffic)
        self.late: LateGather | None = None
        self.absent_names: frozenset[str] = frozenset()
        self._dropped: frozenset[str] = frozenset()  # those of them that user code has dropped
        self.drops = 0
        # Optimizer copies on another device are updated only if the fingerprint of the parameters has changed.
        self._apart = [s for s in self.shards if s.is_copy and s.master.device != s.shard.device]
        self._prints = self._fingerprints()
        self.note()

    def _flat_parts(self, traffic: Traffic, counted: Callable[[str, nn.Parameter], bool | Tensor]) -> list[FlatShard]:
        """A flat buffer for each bucket; `wires` are those of the buckets that other ranks share than `shard_group`."""
        sharers = traffic.sharers or (lambda name: self.shard_group)
        groups = [sharers(bucket.names[0]) for bucket in self._buckets]
        others = [group for group in groups if group not in (None, self.shard_group)]
        self.wires = {group: PlainWire(group, pool=self._pool) for group in others}
        shards = [flatten(bucket, group, self.host) for bucket, group in zip(self._buckets, groups, strict=True)]
        for shard in shards:
            shard.counted = counted_pieces(shard, counted)
        return shards

    def _overlap_of(self, traffic: Traffic) -> Overlap:
        late = frozenset(
            index
            for index, bucket in enumerate(self._buckets)
            if isinstance(bucket.kind, FlatKind) and traffic.late(bucket.kind.user)
        )
        return Overlap(
            self._buckets,
            self._start,
            self._packer.arrived,
            late,
            watches=traffic.overlaps,
            noticed=traffic.noticed,
            early=self._pool.forget,
        )

    @property
    def names(self) -> list[str]:
        """Names of the parameters that are partitioned."""
        return [name for bucket in self._buckets for name in bucket.names]

    def arm(self, factor: float | None) -> None:
        """Allow full buckets to be reduced in the next backward pass, the last before `reduce` (stage 2: `accumulate`)."""
        announced = announced_factor(self.wire, factor)
        if announced is not None:
            self._packer.factor = announced
            self._overlap.arm()

    @torch.no_grad()
    def reduce(self, factor: float) -> None:
        """Add `factor` times the sum of the gradients over all ranks to the gradient of this rank's part.

        `p.grad` of the model's parameters becomes None.
        """
        require_announced(self.wire, self._packer.factor, factor, left=bool(self._under_way) or self._packer.has_begun)
        self._packer.factor = factor
        self._overlap.finish()
        under_way, self._under_way = self._under_way, []
        device = self._buckets[0].device if self._buckets else torch.device("cpu")
        counts = sent_to(device, [float(here) for item in under_way for here in item.present])
        counted = self.wire.all_reduce(counts, None)
        self.wire.flush()
        landed = []
        for index, (shard, item) in enumerate(zip(self.shards, under_way, strict=True)):
            item.arrive(index, factor, self._recorder)
            if self.copies is None:
                landed.append(self._to_optimizer(shard, item.sum))
        counted()
        if self.copies is not None:
            self._over_copies(self.copies, [*(item.sum for item in under_way), counts])
            landed = [self._to_optimizer(shard, item.sum) for shard, item in zip(self.shards, under_way, strict=True)]
        self._note_absent(counts, all(all(item.present) for item in under_way))
        if self.host is not None:
            self.host.wait()
        for shard, part in zip(self.shards, landed, strict=True):
            if shard.master.grad is None:
                shard.master.grad, shard.times = part, shard.times + 1
            else:
                shard.master.grad.add_(part)

    def _to_optimizer(self, shard: FlatShard, mine: Tensor) -> Tensor:
        """The sum of a bucket on the device of the optimizer; the copy overlaps with the sum of the next bucket."""
        mine = mine.to(shard.master.dtype)
        if self.host is None or shard.host_gradient is None:
            return mine
        free = shard.master.grad is None  # else gradients of an earlier pass are in that memory
        target = shard.host_gradient if free else self.host.empty(mine.numel(), mine.dtype)
        self.host.copy_down(mine, target)
        return target

    def _start(self, index: int) -> None:
        begun = self._recorder.mark()
        with torch.no_grad():
            packed = self._packer.pack(index)
            mine, wait = self._summed(index, packed.flat)
        self._under_way.append(UnderWay(mine, packed.factor, packed.present, wait, begun))

    def _summed(self, index: int, flat: Tensor) -> tuple[Tensor, Wait]:
        """Begin to sum a bucket over the ranks that share it; this rank's part."""
        bucket, group = self._buckets[index], self.shards[index].sharers
        if group is None:
            return flat, lambda: None
        return self.wires.get(group, self.wire).reduce_scatter(flat, bucket)

    def _over_copies(self, replicas: Wire, parts: Sequence[Tensor]) -> None:
        """Sum the parts of this rank over the copies of the optimizer state."""
        for wait in [replicas.all_reduce(part, None) for part in parts]:
            wait()

    def _note_absent(self, counts: Tensor, all_here: bool) -> None:
        """Remember which elements have no gradient on any rank: the optimizer must leave them as they are."""
        anywhere = iter([True] * len(counts) if all_here else [count > 0.0 for count in counts.tolist()])
        absent_names = set()
        for shard in self.shards:
            missing = [position for position in range(len(shard.bucket.params)) if not next(anywhere)]
            found = [piece for position in missing if (piece := shard.inside(position)) is not None]
            fresh = shard.master.grad is None  # else gradients of an earlier pass are there already
            names = {shard.bucket.names[position] for position in missing}
            absent_names |= names if fresh else names & self.absent_names
            shard.absent = found if fresh else [piece for piece in shard.absent if piece in found]
        self.absent_names, self._dropped = frozenset(absent_names), frozenset()

    def dropped(self, names: Collection[str]) -> None:
        """Note gradients that user code has dropped: a part of these parameters alone has none, and counts no step."""
        gone = self.absent_names | frozenset(names)
        for shard in self.shards:
            if gone.issuperset(shard.bucket.names):
                shard.master.grad, shard.absent = None, []
        self._dropped, self.absent_names = self._dropped | (gone - self.absent_names), gone

    def zero_grad(self) -> None:
        """Drop the gradients of this rank's parts."""
        for shard in self.shards:
            shard.master.grad = None

    def gather_late(self, model: nn.Module) -> None:
        """Gather updated parameters while the next forward pass of `model` runs."""
        shard_of = {id(param): index for index, shard in enumerate(self.shards) for param in shard.bucket.params}
        self.late = LateGather(model, shard_of, self._waiting, self._recorder)

    def _fingerprints(self) -> Tensor | None:
        return torch.stack([fingerprint(shard.shard) for shard in self._apart]) if self._apart else None

    @torch.no_grad()
    def take_edits(self) -> None:
        """Copy weights that user code changed since the last step (clamped, loaded, assigned) into the optimizer's copies."""
        if self.late is not None:
            self.late.wait_for_all()
        for shard in self.shards:
            shard.refuse_changes()
            shard.return_to_buffer()
        now, changed = self._fingerprints(), None
        if now is not None and self._prints is not None:
            changed = torch.empty(len(now), dtype=torch.bool, pin_memory=self.host is not None and self.host.pinned)
            changed.copy_(now != self._prints, non_blocking=True)
        if self.host is not None:
            self.host.wait()  # the optimizer waits here anyway
        flags = iter(changed.tolist() if changed is not None else [])
        for shard in self.shards:
            if shard not in self._apart or next(flags):
                shard.take_edits()
        self._prints = now
        self.note()

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.counts.step(self.shards, self.absent_names, self._dropped)
        if self._dropped:
            self.drops = crc32(" ".join(sorted(self._dropped)).encode(), self.drops)
        self.take_edits()
        if self._kernel is not None:
            self._kernel.before(optimizer.param_groups)
        for shard in self.shards:
            kept = [shard.master.data, *per_element(optimizer, shard)]
            shard.had_state = len(kept) > 1
            shard.saved = [(tensor, piece, tensor[piece].clone()) for piece in shard.absent for tensor in kept]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        for shard in self.shards:
            for tensor, piece, before in shard.saved:
                tensor[piece] = before
            if shard.absent and not shard.had_state:
                self._drop_first_state(optimizer, shard)
            shard.saved = []
        if self._kernel is not None:
            self._kernel.after()
        self.gather()

    def _drop_first_state(self, optimizer: Optimizer, shard: FlatShard) -> None:
        """State that a first step made of elements that have no gradient yet is that of elements not stepped on: zero."""
        for tensor in per_element(optimizer, shard):
            for piece in shard.absent:
                tensor[piece] = 0

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the updated parts into the flat buffers of the model's parameters. Collective."""
        works = []
        for shard in self.shards:
            if shard.is_copy:
                shard.shard.copy_(shard.master, non_blocking=True)
            if shard.sharers is None:
                continue
            self.gathered_bytes += shard.shard.nbytes
            works.append(all_gather_flat(shard.flat, shard.shard, shard.sharers))
        self._prints = self._fingerprints()
        self.note()
        if self.late is not None:
            self.late.put(works)
            return
        with self._recorder.span("gather"), self._waiting("waits for the updated parameters of the other replicas"):
            for work in works:
                if work is not None:
                    work.wait()

    def note(self) -> None:
        """Remember the versions of the optimizer's parts: changes that come later, outside of a step, are refused."""
        for shard in self.shards:
            shard.note()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's parameters, which were loaded, into the fp32 copies."""
        for shard in self.shards:
            shard.refuse_changes()
            shard.return_to_buffer()
            if shard.is_copy:
                shard.master.copy_(shard.shard)
        self._prints = self._fingerprints()
        self.note()

    def gradients(self) -> list[Tensor]:
        """Gradients of this rank's parts, without what another rank counts already."""
        pieces = []
        for shard in self.shards:
            gradient = shard.master.grad
            if gradient is not None:
                pieces += [gradient[at] if mask is None else gradient[at] * mask for at, mask in shard.counted]
        return pieces


def _buckets_of(
    taken: Sequence[tuple[str, nn.Parameter]], group_of: Mapping[int, int], traffic: Traffic, num_parts: int
) -> list[Bucket]:
    """Buckets of parameters of one dtype and one group of the optimizer each, which divide into `num_parts` aligned parts."""

    def kind_of(name: str, param: nn.Parameter) -> FlatKind:
        return FlatKind(param.dtype, group_of[id(param)], traffic.kind(name, param))

    multiple = ALIGN * num_parts
    return lay_out(taken, traffic.bucket_bytes, kind=kind_of, align=ALIGN, multiple=multiple, dtype=traffic.dtype)
