"""Counts the costs and savings of a plan, from the plan alone: shares of compute, memory per rank, bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hf_parallel.tensor_parallel.shard_plan import Coverage, PairPlan, SequencePlan, TPPlan


FP32 = 4  # bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends in one forward and backward pass.

    Args:
        per_token: For activations, per token of the batch.
        per_pass: For gradients of weights that all ranks hold, per backward pass whatever its size.
    """

    per_token: float
    per_pass: float


def flops_coverage(plan: TPPlan) -> Coverage:
    """Shares of the forward's matrix products in pairs, in gathered linears, and repeated on every rank."""
    totals = {"paired": 0.0, "gathered": 0.0, "replicated": 0.0}
    roots = tuple(f"{pair.root}." for pair in plan.pairs)
    normed = {name for pair in plan.pairs for name in pair.norms}
    for name, flops in plan.flops.items():
        linear = plan.linears.get(name)
        if linear is not None:
            split = 0.0 if linear.role == "latent" else 1.0 if linear.take else linear.weight.sharded_share
            totals["gathered" if linear.role == "gather" else "paired"] += flops * split
            totals["replicated"] += flops * (1.0 - split)
        else:
            inside = f"{name}.".startswith(roots) and name not in plan.whole and name not in normed
            totals["paired" if inside else "replicated"] += flops
    total = sum(totals.values()) or 1.0
    return Coverage(**{kind: value / total for kind, value in totals.items()})


def bytes_per_rank(plan: TPPlan, element_size: int) -> list[int]:
    """Bytes of parameters on each rank."""
    specs = plan.shard_specs()
    held = []
    for rank in range(plan.tp_size):
        parts = (
            numel * specs[name].local_size(plan.tp_size, rank) // specs[name].full_size if name in specs else numel
            for name, numel in plan.numel.items()
        )
        held.append(element_size * sum(parts))
    return held


def traffic(plan: TPPlan, element_size: int, reduced_size: int | None = None) -> Traffic:
    """Bytes on the wire, with ring collectives: an all-reduce of n bytes sends 2 n (t - 1) / t, an all-gather half.

    Args:
        plan: The plan.
        element_size: Bytes of an activation.
        reduced_size: Bytes of an element that is summed over the ranks; None for `element_size`.
    """
    reduced_size = reduced_size or element_size
    reduced, gathered, weights = 0.0, 0.0, 0.0
    for pair in plan.pairs:
        reduced += _reduced_per_token(plan, pair)
        gathered += sum(spec.full_size for spec in pair.norms.values())
        weights += sum(plan.numel.get(name, 0) for name in (*pair.partial, *pair.scaled))
    for name, linear in plan.linears.items():
        numel = plan.numel.get(f"{name}.weight", 0)
        if linear.role == "gather":
            gathered += linear.weight.full_size
            reduced += numel / linear.weight.full_size
        elif linear.role == "column":
            weights += numel * (1.0 - linear.weight.sharded_share)
    ends = _reduced_by_vocabulary(plan)
    reduced += ends.head
    if plan.sequence is not None:
        gathered += _moved_for_sequence(plan.sequence)
        weights += sum(
            plan.numel.get(f"{block.name}.{name}", 0) for block in plan.sequence.blocks for name in block.partial
        )
    ring = (plan.tp_size - 1) / plan.tp_size
    # With a sequence that is shared the second half of an all-reduce is an all-gather, of what was rounded before.
    back = reduced_size if plan.sequence is None else element_size
    sums = reduced * (reduced_size + back) + 2 * (ends.embedding * element_size + ends.loss * FP32)
    return Traffic(ring * (sums + element_size * gathered), ring * 2 * reduced_size * weights)


class _Ends(NamedTuple):
    """Elements all-reduced per token by an embedding and a head that are cut by rows of the vocabulary.

    Output of the embedding, in which one rank's rows meet zeros; gradient of the head's input; numbers of the loss.
    """

    embedding: float
    head: float
    loss: float


def _reduced_by_vocabulary(plan: TPPlan) -> _Ends:
    names = {linear.role: name for name, linear in plan.linears.items() if linear.role.startswith("vocab_")}
    widths = [plan.numel.get(f"{name}.weight", 0) / plan.linears[name].weight.full_size for name in names.values()]
    width = max(widths, default=0.0)  # a tied pair is counted under one of its names
    return _Ends(
        embedding=width if "vocab_embedding" in names else 0.0,
        head=width if "vocab_head" in names else 0.0,
        loss=4.0 if names else 0.0,
    )


def _moved_for_sequence(plan: SequencePlan) -> float:
    """Elements gathered or reduce-scattered per token beyond what the same pairs all-reduce.

    A gather and a reduce-scatter move what an all-reduce does. On top of that come the ends of the stack, the second
    gather of each region's input in the backward pass, and for a region whose rows all-reduce the gather behind it; a
    block on the whole sequence is gathered and cut.
    """
    moved = 2.0
    for block in plan.blocks:
        moved += 2.0 if block.whole else sum(2.0 if region.exit == "split" else 1.0 for region in block.regions)
    return moved * plan.width


def _reduced_per_token(plan: TPPlan, pair: PairPlan) -> float:
    """Elements all-reduced per token in one pair, forward and backward."""
    total = float(sum(spec.full_size for spec in pair.norms.values()))
    widths = []
    for name in pair.columns:
        linear = plan.linears[name]
        numel, full = plan.numel.get(f"{name}.weight", 0), linear.weight.full_size
        if linear.role == "latent":
            total += full
        elif linear.role == "reduce":
            total += 2 * numel / full
        elif linear.entry:
            widths.append(numel / full)
    total += max(widths, default=0.0)  # columns that read the same tensor share one sum of its gradient
    row = plan.linears.get(pair.row)
    if row is not None:
        return total + plan.numel.get(f"{pair.row}.weight", 0) / row.weight.full_size
    return total + 2 * _expert_width(plan)


def _expert_width(plan: TPPlan) -> float:
    """Width of what enters and leaves experts, taken from any row-parallel linear: which one is of the same layer is not recorded."""
    for name, linear in plan.linears.items():
        if linear.role == "row":
            return plan.numel.get(f"{name}.weight", 0) / linear.weight.full_size
    return 0.0


def report(plan: TPPlan, element_size: int, reduced_size: int | None = None) -> list[str]:
    """Lines for the start of a run; sizes as for `traffic`."""
    share, work, wire = plan.coverage(), flops_coverage(plan), traffic(plan, element_size, reduced_size)
    held, full = bytes_per_rank(plan, element_size), element_size * sum(plan.numel.values())
    lines = [
        f"tensor parallel: {share.paired:.0%} of the parameters in column-row pairs, {share.gathered:.0%} sharded with "
        f"gathered outputs, {share.replicated:.0%} replicated; of the matrix products {work.paired:.0%}, "
        f"{work.gathered:.0%}, {work.replicated:.0%}",
        f"tensor parallel: {max(held) / 1e6:.1f} MB of parameters per rank instead of {full / 1e6:.1f} MB; each rank "
        f"sends {wire.per_token / 1e3:.1f} kB per token and {wire.per_pass / 1e6:.2f} MB per backward pass",
    ]
    return lines if plan.sequence is None else [*lines, *_report_sequence(plan.sequence)]


def _report_sequence(plan: SequencePlan) -> list[str]:
    whole = {block.name: block.whole for block in plan.blocks if block.whole}
    lines = [
        f"sequence parallel: {len(plan.blocks) - len(whole)} of {len(plan.blocks)} blocks of {plan.stack} on parts of the "
        "sequence"
    ]
    for name, reason in list(whole.items())[:1]:
        lines.append(f"sequence parallel: {len(whole)} blocks on all of it, among them {name}: {reason}")
    return lines
