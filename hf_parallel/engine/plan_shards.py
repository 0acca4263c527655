"""The tensor-parallel plan of a run: made on rank 0, the same on every rank, its fallbacks reported."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from torch import nn

from hf_parallel.engine.setup import Setup, StandIn
from hf_parallel.errors import PlanError
from hf_parallel.model.fewer import Kept, with_blocks
from hf_parallel.model.probes import Probes
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.overrides import OVERRIDDEN
from hf_parallel.tensor_parallel.plan.repeated import Repetition, is_within_blocks, repeated
from hf_parallel.tensor_parallel.plan.share import plan_on_one_rank
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)


def plan_shards(setup: Setup, probes: Probes, stand_in: StandIn | None, kept: Kept | None = None) -> TPPlan:
    """The plan that rank 0 makes, on every rank; collective.

    Args:
        setup: The whole model.
        probes: The batches to try it with.
        stand_in: For a model without values.
        kept: Blocks that show what all blocks do; None: all are tried. Only rank 0 needs them.

    Raises:
        PlanError: No plan, or `tensor_parallel.on_fallback: error` and a layer that is no column-row pair.
    """
    settings = setup.config.tensor_parallel
    planner = partial(plan_model, setup.model) if stand_in is None else stand_in.plan

    def make() -> TPPlan:
        asked: dict[str, Any] = {"overrides": None if settings.plan == "auto" else settings.plan}
        asked |= {"vocabulary": settings.vocab_parallel_loss, "experts": settings.experts}
        asked["sequence"] = settings.sequence_parallel
        if kept is not None and settings.plan == "auto":  # patterns may name single blocks
            fewer = with_blocks(setup.model, kept.stack, kept.blocks)
            with suppress(PlanError):  # then it is for the whole model to say why
                plan = plan_model(fewer, setup.mesh.shape.tp_size, probes.batch, **asked)
                if is_within_blocks(plan, (kept.stack,)):
                    return repeated(plan, Repetition((kept.stack,), kept.shown_by), setup.model)
        return planner(setup.mesh.shape.tp_size, probes.batch, **asked)

    plan = plan_on_one_rank(make, setup.watchdog.waiting)
    judge_fallbacks(plan, settings.on_fallback, setup.mesh.rank, vocabulary_modules(setup.model))
    return plan


def vocabulary_modules(model: nn.Module) -> frozenset[str]:
    """Names of the input embedding and the head: why they are not sharded over the vocabulary is reported apart."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    inside = {
        id(module) for end in ends if end is not None for module in end.modules()
    }  # an adapter's, or a trained copy's
    return frozenset(name for name, module in model.named_modules() if id(module) in inside)


def judge_fallbacks(
    plan: TPPlan, on_fallback: Literal["warn", "error", "ignore"], rank: int, expected: frozenset[str]
) -> None:
    """Report layers that are not column-row pairs: they cost an all-gather each, or are not sharded at all.

    Raises:
        PlanError: `on_fallback` is "error" and there are such layers beside the `expected` ones.
    """
    wanted = ("gathered: " + OVERRIDDEN, "replicated: " + OVERRIDDEN)
    fallbacks = {n: why for n, why in plan.fallbacks.items() if n not in expected and not why.startswith(wanted)}
    if not fallbacks or on_fallback == "ignore":
        return
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(fallbacks.items())[:3])
    text = f"tensor_parallel: {len(fallbacks)} layers are not column-row pairs, among them {shown}."
    if on_fallback == "error":
        raise PlanError(f"{text} Set tensor_parallel.on_fallback to warn, or choose a tp_size that divides the heads.")
    if rank == 0:
        logger.warning("hf_parallel: %s", text)
