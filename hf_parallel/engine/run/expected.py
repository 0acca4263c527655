"""Expectations of the plans about a model copy, kept for comparison with what the ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from hf_parallel.pipeline_parallel.plan.predict_cut import Holding, Prediction
from hf_parallel.settings.replica_sections import ZeroConfig


@dataclass(frozen=True)
class Expected:
    """Expectations of the plans about a model copy.

    Attributes:
        forward: Cost of one microbatch on each stage, in a unit of the plan; empty with one stage.
        backward: Cost of the full backward, in the same unit.
        weights: Part of the backward's cost that gradients of weights take.
        bubble: Idle share of the ranks in a step, None with one stage.
        states_bytes: Bytes of weights, gradients and Adam's states on each pipeline rank, without ZeRO.
        activation_bytes: Bytes of activations on each pipeline rank, for each token of a microbatch; empty with one
            stage.
        recomputed: Blocks that run twice.
    """

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    bubble: float | None = None
    states_bytes: tuple[tuple[int, int, int], ...] = ()
    activation_bytes: tuple[float, ...] = ()
    recomputed: int = 0


def states_with_zero(
    states: tuple[float, float, float], zero: ZeroConfig, shard_group: ProcessGroup | None
) -> tuple[float, float, float]:
    """Bytes of a rank's weights, gradients and Adam's states that ZeRO leaves to it.

    Args:
        states: Bytes of the states of its part of the model, without ZeRO.
        zero: The settings.
        shard_group: The replicas that share them out; None if there is one.
    """
    weights, gradients, adam = states
    parts = shard_group.size() if shard_group is not None and zero.stage else 1
    return (
        weights / (parts if zero.shards_parameters else 1),
        gradients / (parts if zero.stage > 1 else 1),
        adam / parts,
    )


def expected(
    holdings: Sequence[Holding], prediction: Prediction | None, recomputed: Sequence[Sequence[int]]
) -> Expected:
    """Put together what the plans say.

    Args:
        holdings: Holding of each pipeline rank.
        prediction: Prediction for the cut; None with one stage.
        recomputed: Groups of blocks whose activations are not kept.
    """
    states = tuple((held.weights, held.gradients, held.optimizer) for held in holdings)
    blocks = sum(map(len, recomputed))
    if prediction is None:
        return Expected(states_bytes=states, recomputed=blocks)
    return Expected(
        tuple(stage.forward for stage in prediction.stages),
        tuple(stage.backward for stage in prediction.stages),
        tuple(stage.weights for stage in prediction.stages),
        prediction.bubble,
        states,
        tuple(rank.activations for rank in prediction.ranks),
        blocks,
    )
