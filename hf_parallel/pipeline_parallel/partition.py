"""Block ranges of the stages: even, given, or balanced by cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.plan import PipelinePlan
from hf_parallel.pipeline_parallel.stack import blocks_of


Split = Literal["balanced", "even"] | Sequence[int]


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """Forward cost of a model by part, in any one unit (FLOPs here); backward is a common factor.

    Args:
        blocks: cost of each block.
        first: extra cost of the first stage (everything before block 0).
        last: extra cost of the last stage (final norm, head, loss).
    """

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0


def block_costs(model: nn.Module, plan: PipelinePlan, num_tokens: int = 1) -> StageCosts:
    """Forward matmul FLOPs of each block, of the prologue and of the tail.

    The numbers are the shape formulas (2 m n k per product) summed over the ops of the discovery forward: 2 FLOPs per
    weight and token, vocabulary x hidden for the head whether tied or not, the routed experts only, no cost for an
    embedding look-up. Code between blocks counts for the block after it. Attention products are those of the sample's
    short sequence, so for long sequences they are undercounted alike in every block.

    Args:
        model: the model; a block whose kernels torch cannot count costs 2 FLOPs per element of its matrices.
        plan: from `discover_stages`.
        num_tokens: tokens to scale to, >= 1.

    Source: PaLM (arXiv 2204.02311) appendix B, without the attention term.
    """
    scale = num_tokens / plan.num_tokens
    flops = {epoch: value * scale for epoch, value in plan.flops.items()}
    count = plan.num_blocks
    weights = [sum(p.numel() for p in b.parameters() if p.ndim > 1) for b in blocks_of(model, plan.stack)]
    inside = [
        (flops.get(2 * j + 1, 0.0) or 2.0 * num_tokens * weights[j]) if j in plan.blocks else 0.0 for j in range(count)
    ]
    between = [flops.get(2 * j, 0.0) if j else 0.0 for j in range(count)]
    return StageCosts(
        tuple(a + b for a, b in zip(inside, between, strict=True)), flops.get(0, 0.0), flops.get(2 * count, 0.0)
    )


def partition(num_blocks: int, num_stages: int, split: Split, costs: StageCosts | None = None) -> list[int]:
    """Bounds [0, ..., num_blocks] of contiguous, non-empty stages.

    Args:
        num_blocks: blocks of the stack.
        num_stages: stages, 1 .. num_blocks.
        split: "even" (sizes differ by at most one, larger stages first), "balanced" (smallest possible cost of the
            costliest stage, then the smallest sum of squares), or the number of blocks of each stage.
        costs: needed by "balanced"; equal blocks without it.

    Raises:
        PlanError: Fewer blocks than stages, or an explicit list that does not fit.
    """
    if num_stages < 1 or num_blocks < num_stages:
        raise PlanError(
            f"pp_size x virtual stages = {num_stages} stages need at least one block each, but the model has "
            f"{num_blocks} blocks. Use at most {max(num_blocks, 1)} stages."
        )
    if split == "even" or (split == "balanced" and costs is None):
        size, larger = divmod(num_blocks, num_stages)
        return _bounds([size + (i < larger) for i in range(num_stages)])
    if split == "balanced" and costs is not None:
        return _balanced(num_blocks, num_stages, costs)
    if isinstance(split, str):
        raise PlanError(f"pipeline.split={split!r} is unknown. Use 'balanced', 'even' or a list of block counts.")
    sizes = list(split)
    if len(sizes) != num_stages or sum(sizes) != num_blocks or min(sizes) < 1:
        raise PlanError(
            f"pipeline.split={sizes} has {len(sizes)} entries that sum to {sum(sizes)}; it needs {num_stages} entries "
            f">= 1 (one a stage) that sum to the model's {num_blocks} blocks."
        )
    return _bounds(sizes)


def _bounds(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def stage_costs(bounds: Sequence[int], costs: StageCosts) -> list[float]:
    """Cost of each stage of a partition, prologue and tail included."""
    return [
        _range_cost(lo, hi, len(bounds) - 1, index, [0.0, *accumulate(costs.blocks)], costs)
        for index, (lo, hi) in enumerate(pairwise(bounds))
    ]


def _range_cost(lo: int, hi: int, num_stages: int, index: int, sums: Sequence[float], costs: StageCosts) -> float:
    extra = (costs.first if index == 0 else 0.0) + (costs.last if index == num_stages - 1 else 0.0)
    return sums[hi] - sums[lo] + extra


def _balanced(num_blocks: int, num_stages: int, costs: StageCosts) -> list[int]:
    """Dynamic program twice: the smallest maximum first, then the evenest partition that reaches it."""
    if len(costs.blocks) != num_blocks:
        raise PlanError(
            f"costs name {len(costs.blocks)} blocks, the model has {num_blocks}. Make them from its own plan."
        )
    sums = [0.0, *accumulate(costs.blocks)]

    def solve(limit: float, by_maximum: bool) -> tuple[float, list[int]]:
        best: list[tuple[float, list[int]]] = [(0.0, [0])] + [(float("inf"), [])] * num_blocks
        for index in range(num_stages):
            row: list[tuple[float, list[int]]] = [(float("inf"), [])] * (num_blocks + 1)
            for hi in range(index + 1, num_blocks - (num_stages - 1 - index) + 1):
                for lo in range(index, hi):
                    value, path = best[lo]
                    cost = _range_cost(lo, hi, num_stages, index, sums, costs)
                    if not path or cost > limit:
                        continue
                    total = max(value, cost) if by_maximum else value + cost * cost
                    if not row[hi][1] or total < row[hi][0]:
                        row[hi] = (total, [*path, hi])
            best = row
        return best[num_blocks]

    smallest, _ = solve(float("inf"), by_maximum=True)
    return solve(smallest * (1 + 1e-12), by_maximum=False)[1]
