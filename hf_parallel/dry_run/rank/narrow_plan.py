"""A narrow model that stands for a wide one where plans take values: same blocks, heads and code, fewer channels.

A tensor-parallel plan is found, and verified, with numbers. The real widths of a large model would take more memory than a
laptop has, and none of what a plan says depends on them but sizes, which are scaled back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_parallel.engine.setup import StandIn
from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import Section, ShardSpec
from hf_parallel.tensor_parallel.plan.plan_for import Blueprint, plan_for, reduced_model
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite, LinearPlan, PairPlan, TPPlan


SMALL_ENOUGH: Final = 64e6  # elements of a block: a model of two such is planned in seconds
# Numbers of a config that are widths; all of them are divided by one number.
WIDTHS: Final = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim", "rotary_dim", "kv_channels"),
)
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LEAST_HEAD: Final = 8  # channels of a head: positions are rotated in pairs


def stand_in_for(model: nn.Module, config: Any) -> StandIn:
    """What answers questions about values, for a model without them.

    Args:
        model: The whole model on `meta`.
        config: Of it.
    """
    narrow = _narrowed(model, config)

    def plan(tp_size: int, sample: Mapping[str, Any], **settings: Any) -> TPPlan:
        if narrow is None:
            return plan_for(config, tp_size, sample=sample, **settings)
        made = plan_for(narrow, tp_size, sample=sample, **settings)
        return widened(made, _skeleton(narrow), model)

    def small() -> nn.Module:
        return reduced_model(Blueprint(config if narrow is None else narrow, AutoModelForCausalLM.from_config))

    return StandIn(plan, small)


def _skeleton(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model


def _narrowed(model: nn.Module, config: Any) -> Any:
    """A config of narrower blocks; None where the real ones are small, or cannot be narrowed."""
    blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    if max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0) <= SMALL_ENOUGH:
        return None
    text = config.get_text_config()
    heads = next((n for name in HEADS if isinstance(n := getattr(text, name, None), int)), 0)
    widths = {name: n for name in WIDTHS if isinstance(n := getattr(text, name, None), int) and n > 0}
    hidden = max((widths.get(name, 0) for name in WIDTHS[:3]), default=0)
    if not heads or not hidden:
        return None
    head = widths.get("head_dim", hidden // heads)
    common = math.gcd(*widths.values(), head)
    times = next((n for n in (32, 16, 8, 4, 2) if common % n == 0 and head // n >= LEAST_HEAD), 1)
    if times == 1:
        return None
    made = copy.deepcopy(config)
    for name, number in widths.items():
        key = text.attribute_map.get(name, name)
        if key in vars(text):
            vars(made.get_text_config())[key] = number // times
    try:
        return made if _is_alike(_skeleton(made), model) else None
    except Exception:  # noqa: BLE001 - a config may insist on widths in any way
        return None


def _is_alike(narrow: nn.Module, wide: nn.Module) -> bool:
    """Whether both have the same parameters but for widths that are multiples."""
    here, there = (dict(one.named_parameters()) for one in (narrow, wide))
    return here.keys() == there.keys() and all(
        p.ndim == there[name].ndim and all(b % a == 0 for a, b in zip(p.shape, there[name].shape, strict=True))
        for name, p in here.items()
    )


def widened(plan: TPPlan, narrow: nn.Module, wide: nn.Module) -> TPPlan:
    """The plan of a narrow model, for the same model with its real widths.

    Raises:
        PlanError: A number of the plan is no multiple of what it counts.
    """
    return _Widening(narrow, wide).of(plan)


class _Widening:
    """Scales the sizes of a plan by those of the tensors and attributes that they are about."""

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self.narrow, self.wide = narrow, wide
        self._here, self._there = _tensors(narrow), _tensors(wide)

    def of(self, plan: TPPlan) -> TPPlan:
        """The whole plan."""
        sequence = plan.sequence
        if sequence is not None:
            hidden = [module.config.get_text_config().hidden_size for module in (self.narrow, self.wide)]  # type: ignore[union-attr, operator]
            sequence = replace(sequence, width=sequence.width * hidden[1] // hidden[0])
        return replace(
            plan,
            linears={name: self._linear(name, linear) for name, linear in plan.linears.items()},
            pairs=tuple(map(self._pair, plan.pairs)),
            numel={name: p.numel() for name, p in self.wide.named_parameters()},
            sequence=sequence,
        )

    def _linear(self, name: str, linear: LinearPlan) -> LinearPlan:
        weight = self._spec(f"{name}.weight", linear.weight)
        bias = None if linear.bias is None else self._spec(f"{name}.bias", linear.bias)
        times = weight.full_size // max(1, linear.weight.full_size)
        take = tuple(tuple((start * times, length * times) for start, length in ranges) for ranges in linear.take)
        return replace(linear, weight=weight, bias=bias, take=take)

    def _pair(self, pair: PairPlan) -> PairPlan:
        return replace(
            pair,
            rewrites=tuple(map(self._rewrite, pair.rewrites)),
            sliced={name: self._spec(name, spec) for name, spec in pair.sliced.items()},
            norms={name: self._spec(f"{name}.weight", spec) for name, spec in pair.norms.items()},
        )

    def _spec(self, name: str, spec: ShardSpec) -> ShardSpec:
        times, rest = divmod(self._there[name][spec.dim], self._here[name][spec.dim])
        if rest:
            raise PlanError(f"{name}: its width is no multiple of that of the narrow model that was planned.")
        sections = (
            Section(one.size * times, one.sharded, one.unit * times if one.unit > 1 else one.unit)
            for one in spec.sections
        )
        return ShardSpec(spec.dim, tuple(sections))

    def _rewrite(self, rewrite: AttributeRewrite) -> AttributeRewrite:
        before, now = (
            _value(model.get_submodule(rewrite.module), rewrite.attribute) for model in (self.narrow, self.wide)
        )
        if before == now:
            return rewrite

        def scaled(value: Any, small: Any, large: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(scaled(v, a, b) for v, a, b in zip(value, small, large, strict=True))
            return value * large // small if small else value

        return replace(rewrite, values=tuple(scaled(value, before, now) for value in rewrite.values))


def _value(module: nn.Module, attribute: str) -> Any:
    if attribute.startswith("config."):
        return getattr(module.config, attribute.removeprefix("config."))
    return getattr(module, attribute)


def _tensors(model: nn.Module) -> dict[str, tuple[int, ...]]:
    every: Any = {"remove_duplicate": False}
    named = [*model.named_parameters(**every), *model.named_buffers(**every)]
    return {name: tuple(tensor.shape) for name, tensor in named}
