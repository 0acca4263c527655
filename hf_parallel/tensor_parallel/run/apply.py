"""Carry out a tensor-parallel plan in place: local parameters, patched forwards of linears, nothing else.

Every patched forward is a bound method of its module and finds its settings on the module itself, so a copy of the
model uses the copy's parameters. Names under which settings are kept start with `tp_`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.model.tensors import map_tensors, only_tensor
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.run.expert_routing import install_routing
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import (
    Deferral,
    SharedCopy,
    TPGroup,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    take_heads,
)
from hf_parallel.tensor_parallel.run.linear import column_product, plain_product, row_sum
from hf_parallel.tensor_parallel.run.reads import Scope, install_reads, open_in, own
from hf_parallel.tensor_parallel.run.sequence import install_regions, leaves_partial
from hf_parallel.tensor_parallel.run.shard_seeds import PairSeeds, install_seeds
from hf_parallel.tensor_parallel.run.vocab import install_embedding, install_loss
from hf_parallel.tensor_parallel.shard_plan import InputRule, LinearPlan, PairPlan, Ranges, TPPlan


@dataclass
class _LinearState:
    """Settings of a patched linear, kept on the module as `tp_linear`."""

    copy: SharedCopy
    transposed: bool
    weight_dim: int
    lengths: list[int]
    replicated: list[bool]
    gather_sizes: list[int]
    entry: bool
    take: Ranges | None


@dataclass
class _Use:
    """How a rank uses a parameter: times `share`, with the gradients of its `whole` sections along `dim` summed."""

    share: float = 1.0
    dim: int = 0
    lengths: tuple[int, ...] = ()
    whole: tuple[bool, ...] = (True,)


@dataclass
class _PartialState:
    """Parameters of the root of pairs that are wholly or partly held by all ranks; kept as `tp_partial`."""

    copy: SharedCopy
    uses: dict[str, _Use]


@dataclass
class _RowState:
    """Settings of a row that is no linear (experts), kept as `tp_row`."""

    copy: SharedCopy


@dataclass
class _EntryState:
    """Settings of an entry that is no linear (experts), kept as `tp_entry`."""

    copy: SharedCopy


@dataclass
class _NormState:
    """Settings of a module that needs all channels, kept as `tp_norm`."""

    copy: SharedCopy
    sizes: list[int]
    start: int


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
    reduces_in_fp32: bool = False,
) -> None:
    """Turn `model` into the part of it that `tp_rank` computes. In place; call after the model is cut into stages.

    Parameters keep their identity (`p.data` becomes the shard, an existing gradient is cut alike), so ties,
    optimizers and tables by id stay right; optimizer state that already exists does not and must be built anew.
    `out_features` and the like keep the full sizes. All ranks of `group` must then run the same batches in lockstep.

    Copies: `copy.deepcopy` of the result is a working model that communicates over the same group.

    Random numbers: outside pairs all tp ranks must draw the same dropout masks, which holds when they are seeded
    equally and draw equally often (the Trainer seeds all ranks alike). Inside a pair each rank draws its own; whether
    a pair has dropout is decided now, from rates above zero.

    Args:
        model: The model, or a stage of it, the plan was made for.
        plan: From `plan_tensor_parallel`.
        group: The tensor-parallel group.
        tp_rank: This rank in `group`.
        holds: Whether this stage holds the parameter (or per-head buffer) of that name; the others are not touched.
        deferral: Puts off the weight gradients of sharded layers, for a schedule that splits backward passes.
        reduces_in_fp32: Whether half-precision partial sums are made and summed over the ranks in fp32.

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
    shared = SharedCopy(group, deferral, widens=reduces_in_fp32)
    held = {name: linear for name, linear in plan.linears.items() if holds(f"{name}.weight")}
    for name in held:
        if vars(model.get_submodule(name)).keys() & {"tp_linear", "tp_embedding"}:
            raise PlanError(f"module {name} is already tensor parallel. Apply a plan once, to a fresh model.")
    tied: set[int] = set()
    for name, linear in held.items():
        module = model.get_submodule(name)
        if linear.role != "latent" and id(module._parameters["weight"]) not in tied:
            _shard_parameter(module, "weight", linear.weight, plan.tp_size, tp_rank)
            tied.add(id(module._parameters["weight"]))
        if linear.role == "vocab_embedding":
            install_embedding(module, shared, *linear.weight.ranges(plan.tp_size, tp_rank)[0])
            continue
        _apply_linear(module, linear, shared, plan.tp_size, tp_rank)
        if linear.role == "vocab_head":
            install_loss(model, module, shared, linear.weight.ranges(plan.tp_size, tp_rank)[0][0])
    seeds = PairSeeds(plan.tp_size, tp_rank)
    for pair in plan.pairs:
        if pair.row in held or (pair.row not in plan.linears and any(holds(name) for name in pair.sliced)):
            _apply_pair(model, pair, shared, tp_rank, is_linear=pair.row in held)
            install_seeds(model, pair, seeds, row_is_linear=pair.row in held)
    if plan.sequence is not None:
        install_regions(model, plan.sequence, shared, holds, seeds)
    _notice_reads(model, plan, shared, tp_rank, holds)


def _notice_reads(
    model: nn.Module, plan: TPPlan, shared: SharedCopy, tp_rank: int, holds: Callable[[str], bool]
) -> None:
    """What a pair shares out is meant in parts in all of the pair's root, the table of an embedding in its forward."""
    scopes: dict[str, Scope] = {}
    for name, linear in plan.linears.items():
        if linear.role == "vocab_embedding" and holds(f"{name}.weight"):
            scopes[f"{name}.weight"] = Scope()
            open_in(model.get_submodule(name), scopes[f"{name}.weight"])
    roots: dict[str, Scope] = {}
    for pair in plan.pairs:
        if any(holds(name) for name in pair.sliced):
            scope = roots.get(pair.root)
            if scope is None:
                scope = roots[pair.root] = Scope(depth=0 if pair.root else 1)  # a model's own forward may be replaced
                if pair.root:
                    open_in(model.get_submodule(pair.root), scope)
            scopes.update(dict.fromkeys(pair.sliced, scope))
    specs = {name: spec for name, spec in plan.shard_specs().items() if holds(name)}
    install_reads(model, specs, scopes, shared, tp_rank, reports=tp_rank == 0)


def _apply_linear(module: nn.Module, linear: LinearPlan, shared: SharedCopy, tp_size: int, tp_rank: int) -> None:
    if linear.bias is not None and linear.role != "latent":
        _shard_parameter(module, "bias", linear.bias, tp_size, tp_rank)
    vars(module)["tp_linear"] = _LinearState(
        copy=shared,
        transposed=linear.transposed,
        weight_dim=linear.weight.dim,
        lengths=linear.weight.local_sections(tp_size, tp_rank),
        replicated=[not section.sharded for section in linear.weight.sections],
        gather_sizes=[linear.weight.local_size(tp_size, rank) for rank in range(tp_size)],
        entry=linear.entry,
        take=linear.take[tp_rank] if linear.take else None,
    )
    forwards = {
        "column": _column_forward,
        "row": _row_forward,
        "gather": _gather_forward,
        "latent": _latent_forward,
        "reduce": _reduce_forward,
        "vocab_head": _vocab_head_forward,
    }
    vars(module)["forward"] = MethodType(forwards[linear.role], module)


def _shard_parameter(module: nn.Module, key: str, spec: ShardSpec, tp_size: int, tp_rank: int) -> None:
    parameter = module._parameters[key]
    if parameter is None:
        raise PlanError(f"the plan shards {key} of {type(module).__name__}, which has none. Plan this very model.")
    if parameter.shape[spec.dim] == spec.local_size(tp_size, tp_rank) != spec.full_size:
        return  # another module that owns it too has sharded it
    grad, parameter.grad = parameter.grad, None
    parameter.data = spec.shard(parameter.data, tp_size, tp_rank)
    if grad is not None:
        parameter.grad = spec.shard(grad, tp_size, tp_rank)


def _apply_pair(model: nn.Module, pair: PairPlan, shared: SharedCopy, tp_rank: int, *, is_linear: bool) -> None:
    tp_size = shared.group.size()
    for rewrite in pair.rewrites:
        set_attribute(model.get_submodule(rewrite.module), rewrite.attribute, rewrite.values[tp_rank])
    _slice_tensors(model, pair, tp_size, tp_rank)
    root = model.get_submodule(pair.root)
    uses = _uses(model, pair, tp_size, tp_rank)
    if uses:
        if "tp_partial" not in vars(root):
            put_over(root, "tp_partial", _PartialState(shared, {}), _partial_forward)
        prefix = f"{pair.root}." if pair.root else ""
        vars(root)["tp_partial"].uses.update({name.removeprefix(prefix): use for name, use in uses.items()})
    for name, spec in pair.norms.items():
        sizes = [spec.local_size(tp_size, rank) for rank in range(tp_size)]
        state = _NormState(shared, sizes, sum(sizes[:tp_rank]))
        put_over(model.get_submodule(name), "tp_norm", state, _norm_forward)
    if pair.routing is not None:
        install_routing(model.get_submodule(pair.row), pair.routing, tp_size, tp_rank)
    for name in pair.entries:
        put_over(model.get_submodule(name), "tp_entry", _EntryState(shared), _entry_forward)
    if not is_linear:
        put_over(model.get_submodule(pair.row), "tp_row", _RowState(shared), _sum_forward)
    if pair.inputs:
        if "tp_inputs" not in vars(root):
            vars(root)["tp_inputs"] = _InputState(shared, (), tp_rank)
            root.register_forward_pre_hook(_take_inputs, with_kwargs=True)
        vars(root)["tp_inputs"].rules += pair.inputs


def _slice_tensors(model: nn.Module, pair: PairPlan, tp_size: int, tp_rank: int) -> None:
    for name, spec in pair.sliced.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if key in module._parameters:
            _shard_parameter(module, key, spec, tp_size, tp_rank)
        else:
            module._buffers[key] = spec.shard(model.get_buffer(name), tp_size, tp_rank)


def _uses(model: nn.Module, pair: PairPlan, tp_size: int, tp_rank: int) -> dict[str, _Use]:
    """Parameters of the pair of which all ranks hold the same elements, and how each rank uses them."""
    uses = {name: _Use() for name in pair.partial} | {name: _Use(1.0 / tp_size) for name in pair.scaled}
    for name, spec in pair.sliced.items():
        whole = tuple(not section.sharded for section in spec.sections)
        if any(whole) and name.rpartition(".")[2] in model.get_submodule(name.rpartition(".")[0])._parameters:
            uses[name] = _Use(1.0, spec.dim, tuple(spec.local_sections(tp_size, tp_rank)), whole)
    return uses


def set_attribute(module: nn.Module, attribute: str, value: int | tuple[int, ...]) -> None:
    """Set `attribute` of `module`; `config.<key>` sets a key of a config that only this module sees."""
    holder, _, key = attribute.rpartition(".")
    if not holder:
        old = getattr(module, key)
        setattr(module, key, list(value) if isinstance(old, list) and isinstance(value, tuple) else value)
        return
    private = copy.copy(getattr(module, holder))
    private.__dict__[key] = value
    setattr(module, holder, private)


def _summed_where_whole(
    tensor: Tensor, dim: int, lengths: Sequence[int], whole: Sequence[bool], shared: SharedCopy
) -> Tensor:
    """Sum (f) the gradients of the sections every rank holds whole, which are partial."""
    if not any(whole):
        return tensor
    if all(whole):
        return _copied(tensor, shared)
    parts = torch.split(tensor, list(lengths), dim)
    return torch.cat(
        [_copied(part, shared) if is_whole else part for part, is_whole in zip(parts, whole, strict=True)], dim
    )


def _copied(x: Tensor, shared: SharedCopy) -> Tensor:
    """F for a tensor that nobody else reads."""
    return copy_to_tp(x, shared.group, widens=shared.widens)


def _column_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    weight = _used(state, own(self, "weight"), state.weight_dim)
    bias = own(self, "bias")
    bias = None if bias is None else _used(state, bias, 0)
    product = column_product if state.entry else plain_product
    return product(state.copy, x, weight, bias, state.transposed)


def _used(state: _LinearState, tensor: Tensor, dim: int) -> Tensor:
    """The outputs of a column that this rank computes."""
    tensor = _summed_where_whole(tensor, dim, state.lengths, state.replicated, state.copy)
    return _taken(state, tensor, dim)


def _taken(state: _LinearState, tensor: Tensor, dim: int) -> Tensor:
    if state.take is None:
        return tensor
    parts = [tensor.narrow(dim, start, length) for start, length in state.take or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _row_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    total = row_sum(state.copy, x, own(self, "weight"), state.transposed)
    bias = own(self, "bias")
    return total if bias is None else total + bias  # after the sum: the bias counts once


def _reduce_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    total = row_sum(state.copy, x, own(self, "weight"), state.transposed)
    bias = own(self, "bias")
    return _taken(state, _copied(total if bias is None else total + bias, state.copy), -1)


def _gather_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    local = column_product(state.copy, x, own(self, "weight"), own(self, "bias"), state.transposed)
    return gather_from_tp(local, state.copy.group, state.gather_sizes)


def _latent_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _LinearState = self.tp_linear
    x = only_tensor(args, named)
    return _copied(plain_product(state.copy, x, own(self, "weight"), own(self, "bias"), state.transposed), state.copy)


def _entry_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """F on every input that carries a gradient."""
    state: _EntryState = self.tp_entry

    def enter(_: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        partial = state.copy.partial_of(tensor)
        return _copied(tensor, state.copy) if partial is None else partial

    return self.tp_entry_inner(*map_tensors(enter, args), **map_tensors(enter, kwargs))


def _sum_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: _RowState = self.tp_row
    out = self.tp_row_inner(*args, **kwargs)
    return out if leaves_partial(self) else reduce_from_tp(out, state.copy.group, widens=state.copy.widens)


def _norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module on the channels of all ranks, of which this rank keeps its own."""
    state: _NormState = self.tp_norm
    group, widens = state.copy.group, state.copy.widens
    local = state.sizes[group.rank()]

    def gather(_: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.shape[-1] != local:
            return tensor
        return copy_to_tp(gather_from_tp(tensor, group, state.sizes), group, widens=widens)

    whole: Tensor = self.tp_norm_inner(*map_tensors(gather, args), **map_tensors(gather, kwargs))
    return whole.narrow(-1, state.start, local)


def _vocab_head_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    if self.tp_vocab.local:
        return self.tp_vocab.left(_column_forward(self, *args, **named))  # type: ignore[no-any-return]
    return _gather_forward(self, *args, **named)


def _partial_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The root's forward with f(parameter) in the place of each partial parameter.

    An instance attribute shadows the registered parameter. Unlike a gradient hook this is right under accumulation and
    when something else (FSDP) replaces the parameter object.
    """
    state: _PartialState = self.tp_partial
    shadowed: list[tuple[dict[str, Any], str]] = []
    try:
        for name, use in state.uses.items():
            path, _, key = name.rpartition(".")
            owner = self.get_submodule(path)
            used = _summed_where_whole(owner._parameters[key], use.dim, use.lengths, use.whole, state.copy)
            vars(owner)[key] = used if use.share == 1.0 else used * use.share
            shadowed.append((vars(owner), key))
        return self.tp_partial_inner(*args, **kwargs)
    finally:
        for holder, key in shadowed:
            holder.pop(key, None)


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
        tensor = _copied(tensor, state.copy)
        if rule.dim is None:
            return tensor
        return take_heads(tensor, rule.dim, rule.heads, group.size(), state.tp_rank)

    return map_tensors(take, args), map_tensors(take, kwargs)
