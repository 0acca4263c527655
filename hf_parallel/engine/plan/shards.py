"""The tensor-parallel plan of a run: made on rank 0, the same on every rank, its fallbacks reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.errors import PlanError
from hf_parallel.model.fewer import Kept
from hf_parallel.model.narrow import Narrow
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.overrides import OVERRIDDEN
from hf_parallel.tensor_parallel.plan.repeated import Repetition, is_within_blocks, repeated
from hf_parallel.tensor_parallel.plan.share import plan_on_one_rank
from hf_parallel.tensor_parallel.plan.widened import widened
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)

CHECKED = "checked shards"  # the verdict on a plan, by its fingerprint


@dataclass(frozen=True)
class NarrowShards:
    """A narrow model and its plan, from which that of the wide one was made.

    Args:
        shown: The model.
        plan: Its plan.
    """

    shown: Narrow
    plan: TPPlan


@dataclass(frozen=True)
class Shown:
    """The smaller model that a plan was made with, in place of the whole one.

    Args:
        kept: Blocks that show what all blocks do to a layer; None where that is not known, or not to be used.
        narrow: A narrow model of them; None without one.
    """

    kept: Kept | None = None
    narrow: NarrowShards | None = None


def plan_shards(setup: Setup, forms: Forms, stand_in: StandIn | None) -> tuple[TPPlan, Shown]:
    """The plan that rank 0 makes, on every rank, and on rank 0 what it was made with; collective.

    Args:
        setup: The whole model.
        forms: The smaller models that stand for it.
        stand_in: For a model without values.

    Raises:
        PlanError: No plan, or `tensor_parallel.on_fallback: error` and a layer that is no column-row pair.
    """
    settings, tp_size = setup.config.tensor_parallel, setup.mesh.shape.tp_size
    asked: dict[str, Any] = {"overrides": None if settings.plan == "auto" else settings.plan}
    asked |= {"vocabulary": settings.vocab_parallel_loss, "experts": settings.experts}
    asked["sequence"] = settings.sequence_parallel
    with_what = Shown()

    def make() -> TPPlan:
        nonlocal with_what
        plan = _remembered(setup)
        if plan is not None:
            return plan
        with_what = Shown(forms.kept)
        if settings.plan == "auto":  # patterns may name single blocks
            plan, narrow = _made_small(forms, tp_size, asked, has_values=stand_in is None)
            with_what = Shown(forms.kept, narrow)
        if plan is None and stand_in is not None:
            plan = stand_in.plan(tp_size, forms.sample, **asked)
        elif plan is None:
            plan = plan_model(setup.model, tp_size, forms.sample, **asked)
        setup.verdicts.put("shards", {"plan": plan.to_json(), "fingerprint": plan.fingerprint()})
        return plan

    plan = plan_on_one_rank(make, setup.watchdog.waiting)
    judge_fallbacks(plan, settings.on_fallback, setup.mesh.rank, vocabulary_modules(setup.model))
    return plan, with_what


def _made_small(
    forms: Forms, tp_size: int, asked: Mapping[str, Any], *, has_values: bool
) -> tuple[TPPlan | None, NarrowShards | None]:
    """The plan by a narrow model, or by few blocks, and the narrow model; None where it is for the whole model to say why not."""
    kept = forms.kept

    def of_all(plan: TPPlan) -> TPPlan | None:
        if kept is None:
            return plan
        if not is_within_blocks(plan, (kept.stack,)):
            return None
        return repeated(plan, Repetition((kept.stack,), kept.shown_by), forms.whole)

    with suppress(Exception):  # whatever is wrong with narrow blocks, the wide ones have the last word
        shown = forms.narrow
        if shown is not None:
            small = plan_model(shown.model, tp_size, shown.batch(forms.sample), **asked)
            plan = of_all(widened(small, shown.model, forms.few))
            if plan is not None:
                return plan, NarrowShards(shown, small)
    if kept is not None and has_values:
        with suppress(PlanError):
            return of_all(plan_model(forms.few, tp_size, forms.sample, **asked)), None
    return None, None


def _remembered(setup: Setup) -> TPPlan | None:
    """The plan of an earlier start that has passed its check; None where there is none, or it is not one for this model."""
    known = setup.verdicts.get("shards")
    try:
        plan = None if known is None else TPPlan.from_json(known["plan"])
        fits = plan is not None and plan.fingerprint() == known["fingerprint"]
        fits = fits and setup.verdicts.get(CHECKED, known["fingerprint"]) is True
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return plan if fits else None


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
