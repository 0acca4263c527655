"""Counts the cost of each part of a model in the discovery forward, in any unit that all parts share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, Literal

from torch import nn

from hf_parallel.compat.private_quantised import quantised_elements
from hf_parallel.model.stack import blocks_of
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span


Unit = Literal["FLOPs", "ms"]

# FLOPs of matmul that a device does in the time it moves one byte of activations: 100 GFLOP/s to 12 GB/s of a CPU core
# in fp32, and about 200 TFLOP/s to 2 TB/s of a data-centre GPU in 16 bit. `pipeline.costs: measured` needs neither.
FLOPS_PER_BYTE: Final = {"cpu": 8.0}
FLOPS_PER_BYTE_OF_OTHERS: Final = 100.0
BACKWARD_RATIO: Final = 2.0  # one product for the gradient of the input, one for that of the weight
RECOMPUTE_RATIO: Final = 3.0  # and the forward again


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """Forward cost of one microbatch by part, in any one unit.

    Args:
        blocks: cost of each block.
        first: extra cost of the first stage (everything before block 0).
        last: extra cost of the last stage (final norm, head, loss).
        backward: the same for the backward; None for twice the forward.
        unit: "ms" if measured, else "FLOPs", matmul FLOPs and what moving bytes costs in terms of them.
        weights: what gradients of weights take of the backward, which some schedules put off; None for half of it.
    """

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0
    backward: StageCosts | None = None
    unit: Unit = "FLOPs"
    weights: StageCosts | None = None

    def of_backward(self) -> StageCosts:
        """Cost of the full backward by part."""
        if self.backward is not None:
            return self.backward
        return self._times([BACKWARD_RATIO] * (len(self.blocks) + 2))

    def of_weights(self) -> StageCosts:
        """Cost of the gradients of weights by part."""
        if self.weights is not None:
            return self.weights
        return self.of_backward()._times([0.5] * (len(self.blocks) + 2))

    def of_trained(self, ratios: Sequence[float]) -> StageCosts:
        """Cost of the gradients of weights by part, where the backward costs `ratios` times the forward if nothing runs again."""
        return self._times([max(0.0, ratio - 1.0) for ratio in ratios])

    def _times(self, factors: Sequence[float]) -> StageCosts:
        """Each part times a factor: of the prologue, of each block, of the tail."""
        blocks = tuple(factor * cost for factor, cost in zip(factors[1:-1], self.blocks, strict=True))
        return StageCosts(blocks, factors[0] * self.first, factors[-1] * self.last, unit=self.unit)

    def of_both(self) -> StageCosts:
        """Cost of forward and backward by part."""
        back = self.of_backward()
        blocks = tuple(a + b for a, b in zip(self.blocks, back.blocks, strict=True))
        return StageCosts(blocks, self.first + back.first, self.last + back.last, unit=self.unit)


def stage_costs(bounds: Sequence[int], costs: StageCosts, speeds: Sequence[float] | None = None) -> list[float]:
    """Forward cost of each stage of a partition, prologue and tail included.

    Args:
        bounds: [0, ..., num_blocks].
        costs: of the parts, on a rank of speed 1.
        speeds: of the rank of each stage, above 0; None if all are 1.
    """
    sums = [0.0, *accumulate(costs.blocks)]
    stages = [sums[hi] - sums[lo] for lo, hi in pairwise(bounds)]
    stages[0] += costs.first
    stages[-1] += costs.last
    return stages if speeds is None else [cost / speed for cost, speed in zip(stages, speeds, strict=True)]


def costs_of_stages(
    bounds: Sequence[int], costs: StageCosts, speeds: Sequence[float] | None
) -> tuple[list[float], list[float], list[float]]:
    """Like `stage_costs`, three times: forward, backward, and the part of the backward that makes gradients of weights."""
    forward, backward, weights = (
        stage_costs(bounds, part, speeds) for part in (costs, costs.of_backward(), costs.of_weights())
    )
    return forward, backward, weights


def block_costs(
    model: nn.Module,
    plan: PipelinePlan,
    *,
    flops_per_byte: float | None = None,
    recomputed: bool = False,
) -> StageCosts:
    """Forward cost a token of each block, of the prologue and of the tail, from the ops of the discovery forward.

    Counted are matmul FLOPs by shape (2 m n k a product): 2 per weight and token, vocabulary x hidden for the head
    whether tied or not, the routed experts only, attention products at the length that the plan's FLOPs are for. Ops
    without FLOPs (norms, activations, the embedding's look-up, the loss) count by the bytes of activations they read and
    write, times `flops_per_byte`: for the cross entropy some copies of the logits, which no FLOP count shows. Those bytes
    are of the plan's short sample, so attention matrices that a kernel writes out are left out. Weights are read once for
    many tokens and count nothing. Code between blocks counts for the next block that runs.

    Args:
        model: the model; a block whose kernels torch cannot count costs 2 FLOPs per element of its matrices, and so do
            quantised matrices.
        plan: from `discover_stages`.
        flops_per_byte: what moving a byte costs, >= 0; None for a typical value of the model's device.
        recomputed: whether the blocks run again in the backward (activation checkpointing).

    Source: PaLM (arXiv 2204.02311) appendix B for the products; the split by traffic is a roofline (Williams 2009).
    """
    if flops_per_byte is None:
        kind = next((p.device.type for p in model.parameters()), "cpu")
        flops_per_byte = FLOPS_PER_BYTE.get(kind, FLOPS_PER_BYTE_OF_OTHERS)
    products = {epoch: value / plan.num_tokens for epoch, value in plan.flops.items()}
    moved = {e: value * flops_per_byte / plan.sample_tokens for e, value in plan.traffic.items()}
    count = plan.num_blocks
    stack = blocks_of(model, plan.stack)
    weights = [sum(p.numel() for p in b.parameters() if p.ndim > 1) for b in stack]
    uncounted = [2.0 * quantised_elements(b) for b in stack]  # of kernels that are not torch's

    def at(epoch: int, fallback: float = 0.0) -> float:
        return (products.get(epoch, 0.0) or fallback) + moved.get(epoch, 0.0)

    parts = [
        at(2 * j + 1, 0.0 if uncounted[j] else 2.0 * weights[j]) + uncounted[j] if j in plan.blocks else 0.0
        for j in range(count)
    ]
    parts.append(at(2 * count))
    for j in range(1, count):
        parts[min((k for k in plan.blocks if k >= j), default=count)] += at(2 * j)
    first, last, blocks = at(0), parts[count], tuple(parts[:count])
    forward, ratios = StageCosts(blocks, first, last), backward_ratios(model, plan)
    again = RECOMPUTE_RATIO - BACKWARD_RATIO if recomputed else 0.0
    back = forward._times([ratios[0], *(ratio + again if ratio else 0.0 for ratio in ratios[1:-1]), ratios[-1]])
    return dataclasses.replace(forward, backward=back, weights=forward.of_trained(ratios))


def backward_ratios(model: nn.Module, plan: PipelinePlan) -> list[float]:
    """Backward cost of the prologue, each block and the tail, relative to its forward: adapters on frozen weights.

    A frozen matrix has a gradient of its input only, and none where nothing before or in it is trained.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    ends = [
        [named[name] for name in plan.readers(span) if name in named]
        for span in (Span(0, 1, False), Span(plan.num_blocks, plan.num_blocks, True))
    ]
    ratios, reached = [], False
    for parameters in [ends[0], *(list(block.parameters()) for block in blocks_of(model, plan.stack)), ends[1]]:
        reached = reached or any(p.requires_grad for p in parameters)
        matrices = [(p.numel(), p.requires_grad) for p in parameters if p.ndim > 1]
        frozen = sum(size for size, trains in matrices if not trains) / max(1, sum(size for size, _ in matrices))
        ratios.append(BACKWARD_RATIO - frozen if reached else 0.0)
    return ratios
