"""Carry out a tensor-parallel plan in place: local parameters, patched forwards of linears, nothing else.

Every patched forward is a bound method of its module and finds its settings on the module itself, so a copy of the
model uses the copy's parameters. Names under which settings are kept start with `tp_`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.functions import (
    Deferral,
    SharedCopy,
    TPGroup,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    take_heads,
)
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.linear import column_product, row_product
from hf_parallel.tensor_parallel.plan import InputRule, LinearPlan, PairPlan, TPPlan
from hf_parallel.tensor_parallel.propose import set_integer
from hf_parallel.tensor_parallel.trace import map_tensors, only_tensor
from hf_parallel.tensor_parallel.vocab import install_embedding, install_loss


@dataclass
class _LinearState:
    """Settings of a patched linear, kept on the module as `tp_linear`."""

    copy: SharedCopy
    transposed: bool
    weight_dim: int
    lengths: list[int]
    replicated: list[bool]
    gather_sizes: list[int]


@dataclass
class _PartialState:
    """Names of a module's partial parameters, and the forward that uses them; kept as `tp_partial`."""

    copy: SharedCopy
    names: list[str]


@dataclass
class _InputState:
    """Rules for inputs of the root of pairs, kept as `tp_inputs`."""

    copy: SharedCopy
    rules: tuple[InputRule, ...]
    tp_rank: int


def apply_tensor_parallel(
    model: nn.Module,
    plan: TPPlan,
    group: TPGroup,
    tp_rank: int,
    holds: Callable[[str], bool],
    *,
    deferral: Deferral | None = None,
) -> None:
    """Turn `model` into the part of it that `tp_rank` computes. In place; call after the model is cut into stages.

    Parameters keep their identity (`p.data` becomes the shard, an existing gradient is cut alike), so ties,
    optimizers and tables by id stay right; optimizer state that already exists does not and must be built anew.
    `out_features` and the like keep the full sizes. All ranks of `group` must then run the same batches in lockstep.

    Copies: `copy.deepcopy` of the result is a working model that communicates over the same group.

    Random numbers: outside pairs all tp ranks must draw the same dropout masks, which holds when they are seeded
    equally and draw equally often (the Trainer seeds all ranks alike). Inside a pair the equal seed makes the mask of
    each rank's part repeat: heads of different ranks drop at the same places. The expectation is right, the masks are
    correlated.

    Args:
        model: The model, or a stage of it, the plan was made for.
        plan: From `plan_tensor_parallel`.
        group: The tensor-parallel group.
        tp_rank: This rank in `group`.
        holds: Whether this stage holds the parameter (or per-head buffer) of that name; the others are not touched.
        deferral: Puts off the weight gradients of sharded layers, for a schedule that splits backward passes.

    Raises:
        PlanError: If the plan is for another number of ranks, was applied before, or does not fit the parameters.
    """
    if plan.tp_size == 1:
        return
    if plan.tp_size != group.size():
        raise PlanError(
            f"the plan is for tp_size={plan.tp_size}, the group has {group.size()} ranks. "
            f"Make a plan for {group.size()}."
        )
    shared = SharedCopy(group, deferral)
    held = {name: linear for name, linear in plan.linears.items() if holds(f"{name}.weight")}
    for name in held:
        if vars(model.get_submodule(name)).keys() & {"tp_linear", "tp_embedding"}:
            raise PlanError(f"module {name} is already tensor parallel. Apply a plan once, to a fresh model.")
    tied: set[int] = set()
    for name, linear in held.items():
        module = model.get_submodule(name)
        if id(module._parameters["weight"]) not in tied:
            _shard_parameter(module, "weight", linear.weight, plan.tp_size, tp_rank)
            tied.add(id(module._parameters["weight"]))
        ((start, length), *_) = linear.weight.ranges(plan.tp_size, tp_rank)
        if linear.role == "vocab_embedding":
            install_embedding(module, shared, start, length)
            continue
        _apply_linear(module, linear, shared, plan.tp_size, tp_rank)
        if linear.role == "vocab_head":
            install_loss(model, module, shared, start)
    for pair in plan.pairs:
        if pair.row in held:
            _apply_pair(model, pair, shared, tp_rank)


def _apply_linear(module: nn.Module, linear: LinearPlan, shared: SharedCopy, tp_size: int, tp_rank: int) -> None:
    if linear.bias is not None:
        _shard_parameter(module, "bias", linear.bias, tp_size, tp_rank)
    vars(module)["tp_linear"] = _LinearState(
        copy=shared,
        transposed=linear.transposed,
        weight_dim=linear.weight.dim,
        lengths=linear.weight.local_sections(tp_size, tp_rank),
        replicated=[not section.sharded for section in linear.weight.sections],
        gather_sizes=[linear.weight.local_size(tp_size, rank) for rank in range(tp_size)],
    )
    forwards = {
        "column": _column_forward,
        "row": _row_forward,
        "gather": _gather_forward,
        "vocab_head": _vocab_head_forward,
    }
    vars(module)["forward"] = MethodType(forwards[linear.role], module)


def _shard_parameter(module: nn.Module, key: str, spec: ShardSpec, tp_size: int, tp_rank: int) -> None:
    parameter = module._parameters[key]
    if parameter is None:
        raise PlanError(f"the plan shards {key} of {type(module).__name__}, which has none. Plan this very model.")
    grad, parameter.grad = parameter.grad, None
    parameter.data = spec.shard(parameter.data, tp_size, tp_rank)
    if grad is not None:
        parameter.grad = spec.shard(grad, tp_size, tp_rank)


def _apply_pair(model: nn.Module, pair: PairPlan, shared: SharedCopy, tp_rank: int) -> None:
    tp_size = shared.group.size()
    for rewrite in pair.rewrites:
        set_integer(model.get_submodule(rewrite.module), rewrite.attribute, rewrite.value)
    for name, spec in pair.sliced.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if key in module._parameters:
            _shard_parameter(module, key, spec, tp_size, tp_rank)
        else:
            module._buffers[key] = spec.shard(model.get_buffer(name), tp_size, tp_rank)
    for name in pair.partial:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if "tp_partial" not in vars(module):
            vars(module)["tp_partial"] = _PartialState(shared, [])
            vars(module)["tp_whole_forward"] = module.forward
            vars(module)["forward"] = MethodType(_partial_forward, module)
        vars(module)["tp_partial"].names.append(key)
    if pair.inputs:
        root = model.get_submodule(pair.root)
        if "tp_inputs" not in vars(root):
            vars(root)["tp_inputs"] = _InputState(shared, (), tp_rank)
            root.register_forward_pre_hook(_take_inputs, with_kwargs=True)
        vars(root)["tp_inputs"].rules += pair.inputs


def _summed_where_whole(state: _LinearState, tensor: Tensor, dim: int) -> Tensor:
    """Sum (f) the gradients of the sections every rank holds whole, which are partial."""
    if not any(state.replicated):
        return tensor
    if all(state.replicated):
        return copy_to_tp(tensor, state.copy.group)
    parts = torch.split(tensor, state.lengths, dim)
    group = state.copy.group
    return torch.cat(
        [copy_to_tp(part, group) if whole else part for part, whole in zip(parts, state.replicated, strict=True)], dim
    )


def _column_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    weight = _summed_where_whole(state, self.weight, state.weight_dim)
    bias = None if self.bias is None else _summed_where_whole(state, self.bias, 0)
    return column_product(state.copy, x, weight, bias, state.transposed)


def _row_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    total = reduce_from_tp(row_product(state.copy, x, self.weight, state.transposed), state.copy.group)
    return total if self.bias is None else total + self.bias  # after the sum: the bias counts once


def _gather_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    local = column_product(state.copy, x, self.weight, self.bias, state.transposed)
    return gather_from_tp(local, state.copy.group, state.gather_sizes)


def _vocab_head_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    return (_column_forward if self.tp_vocab.local else _gather_forward)(self, *args, **named)


def _partial_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's forward with f(parameter) in the place of each partial parameter.

    An instance attribute shadows the registered parameter. Unlike a gradient hook this is right under accumulation and
    when something else (FSDP) replaces the parameter object.
    """
    state: _PartialState = self.tp_partial
    try:
        for name in state.names:
            vars(self)[name] = copy_to_tp(self._parameters[name], state.copy.group)
        return self.tp_whole_forward(*args, **kwargs)
    finally:
        for name in state.names:
            vars(self).pop(name, None)


def _take_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a pair's root: f, then this rank's heads."""
    state: _InputState = vars(module)["tp_inputs"]
    rules = {rule.path: rule for rule in state.rules}
    group = state.copy.group

    def take(path: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        rule = rules.get(path)
        if rule is None:
            return tensor
        tensor = copy_to_tp(tensor, group)
        if rule.dim is None:
            return tensor
        return take_heads(tensor, rule.dim, rule.heads, group.size(), state.tp_rank)

    return map_tensors(take, args), map_tensors(take, kwargs)
