"""The plan of a narrow model (`model.narrow`), for the same model with its real widths: sizes are scaled back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import Section, ShardSpec
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite, LinearPlan, PairPlan, TPPlan


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
        self._refuse_odd_parts(plan)
        sequence = plan.sequence
        if sequence is not None:
            hidden = [module.config.get_text_config().hidden_size for module in (self.narrow, self.wide)]  # type: ignore[union-attr, operator]
            sequence = replace(sequence, width=sequence.width * hidden[1] // hidden[0])
        return replace(
            plan,
            linears={name: self._linear(name, linear) for name, linear in plan.linears.items()},
            pairs=tuple(map(self._pair, plan.pairs)),
            numel={name: p.numel() for name, p in self.wide.named_parameters()},
            flops={name: flops * self._more(name) for name, flops in plan.flops.items()},
            sequence=sequence,
        )

    def _refuse_odd_parts(self, plan: TPPlan) -> None:
        """Refuse widths that are cut by single elements and not evenly, if the blocks read them: wide parts are no multiples of the narrow ones.

        Raises:
            PlanError: A pair has such a width.
        """
        for pair in plan.pairs:
            linears = [plan.linears[name].weight for name in (*pair.columns, pair.row) if name in plan.linears]
            cut = [one for spec in (*linears, *pair.sliced.values()) for one in spec.sections if one.sharded]
            is_odd = any(one.unit < 2 and one.size % plan.tp_size for one in cut)
            if is_odd and any(before != now for before, now in map(self._values, pair.rewrites)):
                raise PlanError(
                    f"{pair.row}: parts of its width are no multiples of those of the narrow model that was planned."
                )

    def _values(self, rewrite: AttributeRewrite) -> tuple[Any, ...]:
        """The attribute in the narrow model, and in the wide one."""
        models = (self.narrow, self.wide)
        return tuple(_value(model.get_submodule(rewrite.module), rewrite.attribute) for model in models)

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

    def _more(self, name: str) -> float:
        """Factor by which products of a module grow: by the elements of its weight, or without one by its channels."""
        here, there = (math.prod(each.get(f"{name}.weight", ())) for each in (self._here, self._there))
        if here > 1:
            return there / here
        configs = [module.config.get_text_config() for module in (self.narrow, self.wide)]  # type: ignore[union-attr, operator]
        narrow, wide = (getattr(config, "hidden_size", 1) for config in configs)
        return float(wide / narrow)

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
        before, now = self._values(rewrite)
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
