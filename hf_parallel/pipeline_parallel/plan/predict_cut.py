"""Predicts the cost of a cut by stage and by rank, before anything has run: compute, step, bubble and memory.

Times come from the costs that the cut was made with, and the step from the simulator without message latency, so they
are predictions of the same kind as the cut, not of the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from hf_parallel.model.samples import TYPICAL_LENGTH
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, Unit, costs_of_stages
from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of
from hf_parallel.pipeline_parallel.schedule.simulate import peak_held, peak_live, simulate
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


@dataclasses.dataclass(frozen=True)
class Holding:
    """Bytes that a rank keeps for its parameters.

    Args:
        parameters: their number on this rank.
        weights: the parameters themselves, and saved buffers (some kinds of quantised weights are buffers).
        gradients: one for each that trains, in its dtype.
        optimizer: Adam's two states for each that trains, in its dtype.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int


@dataclasses.dataclass(frozen=True)
class StagePrediction:
    """Prediction for one stage.

    Args:
        rank: where it runs.
        blocks: its blocks [lo, hi); none for a stage with the tail alone.
        share: of the compute of all stages, in [0, 1].
        forward: time of one microbatch, in the prediction's unit.
        backward: the same, of the full backward.
        weights: what gradients of weights take of that.
        saved: bytes of activations kept for the backward, for each token of a microbatch.
    """

    rank: int
    blocks: tuple[int, int]
    share: float
    forward: float
    backward: float
    weights: float
    saved: float


@dataclasses.dataclass(frozen=True)
class RankPrediction:
    """Prediction for one rank.

    Args:
        holding: what it keeps for its parameters.
        share: of the compute of all ranks, in [0, 1].
        live: most (stage, microbatch) pairs it holds at once.
        activations: most bytes of activations it holds at once, for each token of a microbatch.
    """

    holding: Holding
    share: float
    live: int
    activations: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A cut under a schedule.

    Args:
        stages: by stage index.
        ranks: by pipeline rank.
        step: time of a training step, in the unit.
        bubble: idle share of the ranks in it, in [0, 1).
        unit: of all times.
        num_microbatches: of the step.
    """

    stages: tuple[StagePrediction, ...]
    ranks: tuple[RankPrediction, ...]
    step: float
    bubble: float
    unit: Unit
    num_microbatches: int


def predict(
    plan: PipelinePlan,
    bounds: Sequence[int],
    costs: StageCosts,
    schedule: Schedule,
    holdings: Sequence[Holding],
    speeds: Sequence[float] | None = None,
) -> Prediction:
    """Put together what is known of a cut.

    Args:
        plan: from `discover_stages`.
        bounds: of the cut.
        costs: analytic or measured.
        schedule: actions of a training step.
        holdings: of each pipeline rank.
        speeds: of the rank of each stage; None if all are alike.
    """
    forward, backward, weights = costs_of_stages(bounds, costs, speeds)
    timed = simulate(schedule, forward, backward, weight_costs=weights)
    saved, total = saved_per_token(plan, bounds), sum(forward) + sum(backward) or 1.0
    stages = tuple(
        StagePrediction(rank, (lo, hi), (f + b) / total, f, b, w, kept)
        for rank, (lo, hi), f, b, w, kept in zip(
            placement_of(schedule), pairwise(bounds), forward, backward, weights, saved, strict=True
        )
    )
    ranks = tuple(
        RankPrediction(holding, sum(s.share for s in stages if s.rank == rank), live, held)
        for rank, (holding, live, held) in enumerate(
            zip(holdings, peak_live(schedule), peak_held(schedule, saved), strict=True)
        )
    )
    count = 1 + max(action.microbatch for actions in schedule for action in actions)
    return Prediction(stages, ranks, timed.makespan, timed.bubble_fraction, costs.unit, count)


def saved_per_token(plan: PipelinePlan, bounds: Sequence[int]) -> list[float]:
    """Bytes that each stage keeps for the backward, for each token of a microbatch.

    Distinct storages that autograd saved in the discovery forward, weights left out; attention matrices, which grow with
    the square of the length, are those of its short sample.
    """
    last = len(bounds) - 2
    kept = []
    for index, (lo, hi) in enumerate(pairwise(bounds)):
        begin, end = (2 * lo if lo else 0), (2 * hi if index < last else 2 * plan.num_blocks + 1)
        kept.append(sum(size for epoch, size in plan.saved.items() if begin <= epoch < end) / plan.sample_tokens)
    return kept


def describe(prediction: Prediction, stack: str) -> list[str]:
    """Aligned lines for a person: every stage, every rank, and what is not in the numbers."""
    ms = prediction.unit == "ms"
    mean = sum(s.forward + s.backward for s in prediction.stages) / len(prediction.stages) or 1.0
    scale = 1.0 if ms else 1.0 / mean
    stages = [["stage", "rank", "blocks", "compute", "forward", "backward"]]
    for index, stage in enumerate(prediction.stages):
        lo, hi = stage.blocks
        times = [f"{scale * t:.2f}" for t in (stage.forward, stage.backward)]
        blocks = f"{lo} to {hi - 1}" if hi > lo else "head alone"
        stages.append([str(index), str(stage.rank), blocks, f"{stage.share:.1%}", *times])
    ranks = [["rank", "parameters", "compute", "weights", "gradients", "Adam", "live", "activations/1k tokens"]]
    for number, rank in enumerate(prediction.ranks):
        own = rank.holding
        sizes = [_bytes(size) for size in (own.weights, own.gradients, own.optimizer)]
        row = [str(number), f"{own.parameters / 1e6:.1f}M", f"{rank.share:.1%}", *sizes]
        ranks.append([*row, str(rank.live), _bytes(1000 * rank.activations)])
    unit = (
        f"measured ms for one row of at most {TYPICAL_LENGTH} tokens"
        if ms
        else "relative, 1 is the mean stage's forward and backward"
    )
    return [
        f"cut of {stack} for steps of {prediction.num_microbatches} microbatches; times are {unit}",
        *_aligned(stages),
        *_aligned(ranks),
        f"predicted step {scale * prediction.step:.1f}{' ms' if ms else ''} without messages, bubble "
        f"{prediction.bubble:.1%}",
        "activations are for microbatches of 1000 tokens, without attention matrices; temporary buffers are not counted",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
