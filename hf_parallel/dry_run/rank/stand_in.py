"""The model that answers questions about values in a dry run: a narrow one where the real one is large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from transformers import AutoModelForCausalLM

from hf_parallel.engine.plan.setup import StandIn
from hf_parallel.model.narrow import first_narrow, has_shapes_of, largest_block
from hf_parallel.tensor_parallel.plan.plan_for import Blueprint, plan_for, reduced_model, skeleton
from hf_parallel.tensor_parallel.plan.widened import widened
from hf_parallel.tensor_parallel.shard_plan import TPPlan


SMALL_ENOUGH: Final = 64e6  # elements of a block: a model of two such is planned in seconds


def stand_in_for(model: nn.Module, config: Any) -> StandIn:
    """The model that answers questions about values, for one without them.

    Args:
        model: The whole model on `meta`.
        config: Config of the model.
    """
    narrow = _narrowed(model, config)

    def plan(tp_size: int, sample: Mapping[str, Any], **settings: Any) -> TPPlan:
        if narrow is None:
            return plan_for(config, tp_size, sample=sample, **settings)
        made = plan_for(narrow, tp_size, sample=sample, **settings)
        return widened(made, skeleton(_blueprint(narrow)), model)

    def small(sample: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
        return reduced_model(_blueprint(config if narrow is None else narrow)), sample

    return StandIn(plan, small)


def _blueprint(config: Any) -> Blueprint:
    return Blueprint(config, AutoModelForCausalLM.from_config)


def _narrowed(model: nn.Module, config: Any) -> Any:
    """A config of narrower blocks; None where the real ones are small, or cannot be narrowed."""
    if largest_block(model) <= SMALL_ENOUGH:
        return None

    def judged(made: Any) -> Any:
        return made if has_shapes_of(skeleton(_blueprint(made)), model) else None

    return first_narrow(config, judged, vocabulary=False)
