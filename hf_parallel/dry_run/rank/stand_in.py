"""The model that answers questions about values in a dry run: a narrow one where the real one is large."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_parallel.engine.plan.setup import StandIn
from hf_parallel.model.narrow import has_shapes_of, largest_block
from hf_parallel.model.widths import narrow_configs
from hf_parallel.tensor_parallel.plan.plan_for import Blueprint, plan_for, reduced_model
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
        return widened(made, _skeleton(narrow), model)

    def small(sample: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
        return reduced_model(Blueprint(config if narrow is None else narrow, AutoModelForCausalLM.from_config)), sample

    return StandIn(plan, small)


def _skeleton(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model


def _narrowed(model: nn.Module, config: Any) -> Any:
    """A config of narrower blocks; None where the real ones are small, or cannot be narrowed."""
    if largest_block(model) <= SMALL_ENOUGH:
        return None
    for made in narrow_configs(config, vocabulary=False):
        with suppress(Exception):  # a config may insist on widths in any way
            if has_shapes_of(_skeleton(made), model):
                return made
    return None
