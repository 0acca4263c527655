"""Forwards of sharded layers, one for each role, and what each of them needs to know.

Every forward here becomes a bound method of a module and finds its settings on that module, so a copy of the model uses the
copy's parameters. Names under which settings are kept start with `tp_`. `f` is Megatron-LM's: the identity forward, an
all-reduce backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.head.defer import LogitsDeferral
from hf_parallel.model.tensors import map_tensors, only_tensor
from hf_parallel.tensor_parallel.run.functions import (
    SharedCopy,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    take_heads,
)
from hf_parallel.tensor_parallel.run.linear import column_product, plain_product, rounded_to, row_product, row_sum
from hf_parallel.tensor_parallel.run.reads import own
from hf_parallel.tensor_parallel.run.sequence import leaves_partial
from hf_parallel.tensor_parallel.run.sequence_functions import copies_to_tp
from hf_parallel.tensor_parallel.shard_plan import InputRule, Ranges, Role


@dataclass
class LinearState:
    """Settings of a patched linear, kept on the module as `tp_linear`; `bare` if what is around it communicates."""

    copy: SharedCopy
    transposed: bool
    weight_dim: int
    lengths: list[int]
    replicated: list[bool]
    gather_sizes: list[int]
    entry: bool
    take: Ranges | None
    role: Role
    bare: bool = False


@dataclass
class Use:
    """Use of a parameter by a rank: times `share`, with the gradients of its `whole` sections along `dim` summed."""

    share: float = 1.0
    dim: int = 0
    lengths: tuple[int, ...] = ()
    whole: tuple[bool, ...] = (True,)


@dataclass
class PartialState:
    """Parameters of the root of pairs that are wholly or partly held by all ranks; kept as `tp_partial`."""

    copy: SharedCopy
    uses: dict[str, Use]


@dataclass
class RowState:
    """Settings of a row that is no linear (experts), kept as `tp_row`."""

    copy: SharedCopy


@dataclass
class EntryState:
    """Settings of an entry that is no linear (experts), kept as `tp_entry`."""

    copy: SharedCopy


@dataclass
class NormState:
    """Settings of a module that needs all channels, kept as `tp_norm`."""

    copy: SharedCopy
    sizes: list[int]
    start: int


@dataclass
class InputState:
    """Rules for inputs of the root of pairs, kept as `tp_inputs`."""

    copy: SharedCopy
    rules: tuple[InputRule, ...]
    tp_rank: int


def _summed_where_whole(
    tensor: Tensor, dim: int, lengths: Sequence[int], whole: Sequence[bool], shared: SharedCopy
) -> Tensor:
    """Sum (f) the gradients of the sections that every rank holds: each rank has a partial gradient of them."""
    if not any(whole):
        return tensor
    if all(whole):
        return _copied(tensor, shared)
    parts = torch.split(tensor, list(lengths), dim)
    return torch.cat(
        [_copied(part, shared) if is_whole else part for part, is_whole in zip(parts, whole, strict=True)], dim
    )


def _copied(x: Tensor, shared: SharedCopy) -> Tensor:
    """The function f for a tensor with only one reader."""
    return copy_to_tp(x, shared.group, widens=shared.widens)


def column_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: LinearState = self.tp_linear
    x = only_tensor(args, named)
    weight = _used(state, own(self, "weight"), state.weight_dim)
    bias = own(self, "bias")
    bias = None if bias is None else _used(state, bias, 0)
    product = column_product if state.entry and not state.bare else plain_product
    return product(state.copy, x, weight, bias, state.transposed)  # (..., in) -> (..., out / tp)


def _used(state: LinearState, tensor: Tensor, dim: int) -> Tensor:
    """The outputs of a column that this rank computes."""
    tensor = _summed_where_whole(tensor, dim, state.lengths, state.replicated, state.copy)
    return taken(state, tensor, dim)


def taken(state: LinearState, tensor: Tensor, dim: int) -> Tensor:
    """The outputs that this rank computes of a layer that every rank stores whole."""
    if state.take is None:
        return tensor
    parts = [tensor.narrow(dim, start, length) for start, length in state.take or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def row_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: LinearState = self.tp_linear
    x = only_tensor(args, named)
    if state.bare:
        return row_product(state.copy, x, own(self, "weight"), state.transposed)
    total = row_sum(state.copy, x, own(self, "weight"), state.transposed)  # (..., in / tp) -> (..., out)
    bias = own(self, "bias")
    return total if bias is None else total + bias  # after the sum: otherwise each rank would add the bias


def reduce_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: LinearState = self.tp_linear
    x = only_tensor(args, named)
    if state.bare:
        return row_product(state.copy, x, own(self, "weight"), state.transposed)
    total = row_sum(state.copy, x, own(self, "weight"), state.transposed)
    bias = own(self, "bias")
    return taken(state, _copied(total if bias is None else total + bias, state.copy), -1)


def gather_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: LinearState = self.tp_linear
    x = only_tensor(args, named)
    local = column_product(state.copy, x, own(self, "weight"), own(self, "bias"), state.transposed)
    return gather_from_tp(local, state.copy.group, state.gather_sizes)  # (..., out / tp) -> (..., out)


def latent_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: LinearState = self.tp_linear
    x = only_tensor(args, named)
    out = plain_product(state.copy, x, own(self, "weight"), own(self, "bias"), state.transposed)
    return out if state.bare else _copied(out, state.copy)


def entry_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module with the function f on every input that has a gradient."""
    state: EntryState = self.tp_entry

    def enter(_: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        partial = state.copy.partial_of(tensor)
        return _copied(tensor, state.copy) if partial is None else partial

    return self.tp_entry_inner(*map_tensors(enter, args), **map_tensors(enter, kwargs))


def sum_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: RowState = self.tp_row
    out = self.tp_row_inner(*args, **kwargs)
    return out if leaves_partial(self) else reduce_from_tp(out, state.copy.group, widens=state.copy.widens)


def norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module on the channels of all ranks, gathered; this rank keeps its own part of the result."""
    state: NormState = self.tp_norm
    group, widens = state.copy.group, state.copy.widens
    local = state.sizes[group.rank()]

    def gather(_: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.shape[-1] != local:
            return tensor
        return copy_to_tp(gather_from_tp(tensor, group, state.sizes), group, widens=widens)

    whole: Tensor = self.tp_norm_inner(*map_tensors(gather, args), **map_tensors(gather, kwargs))
    return whole.narrow(-1, state.start, local)  # (..., channels) -> (..., channels / tp)


def vocab_head_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    if self.tp_vocab.local:
        found = _unmade_logits(self, only_tensor(args, named))
        return self.tp_vocab.left(column_forward(self, *args, **named) if found is None else found)  # type: ignore[no-any-return]
    return gather_forward(self, *args, **named)


def _unmade_logits(self: Any, x: Tensor) -> Tensor | None:
    """This rank's columns of the logits, not made; None where the head makes them."""
    state: LinearState = self.tp_linear
    deferral: LogitsDeferral | None = vars(self).get("logits_deferral")
    if deferral is None or rounded_to(state.copy, x) is not None:  # its gradient would be summed in half precision
        return None
    partial = state.copy.partial_of(x)
    hidden = _copied(x, state.copy) if partial is None else partial
    return deferral.logits(hidden, own(self, "weight"), own(self, "bias"))


def partial_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The root's forward with f(parameter) in the place of each partial parameter.

    An instance attribute shadows the registered parameter during the forward. A gradient hook would not do: it would sum gradients
    again that were accumulated before, and be lost when FSDP replaces the parameter object.
    """
    state: PartialState = self.tp_partial
    owners = [self.get_submodule(name.rpartition(".")[0]) for name in state.uses]
    keys = [name.rpartition(".")[2] for name in state.uses]
    uses = list(state.uses.values())
    tensors = [getattr(owner, key) for owner, key in zip(owners, keys, strict=True)]
    try:
        for owner, key, use, used in zip(owners, keys, uses, _all_summed(tensors, uses, state.copy), strict=True):
            vars(owner)[key] = used if use.share == 1.0 else used * use.share
        return self.tp_partial_inner(*args, **kwargs)
    finally:
        for owner, key in zip(owners, keys, strict=True):
            vars(owner).pop(key, None)


def _all_summed(tensors: Sequence[Tensor], uses: Sequence[Use], shared: SharedCopy) -> list[Tensor]:
    """The `tensors` with the gradients of what every rank holds summed over the ranks, by one all-reduce a dtype."""
    parts = [
        list(torch.split(x, list(use.lengths), use.dim)) if use.lengths else [x]
        for x, use in zip(tensors, uses, strict=True)
    ]
    summed = [
        (i, j)
        for i, use in enumerate(uses)
        for j, is_whole in enumerate(use.whole)
        if is_whole and torch.is_grad_enabled() and tensors[i].requires_grad
    ]
    if not summed:
        return list(tensors)
    copies = copies_to_tp([parts[i][j] for i, j in summed], shared.group, widens=shared.widens)
    for (i, j), copied in zip(summed, copies, strict=True):
        parts[i][j] = copied
    return [own[0] if len(own) == 1 else torch.cat(own, use.dim) for own, use in zip(parts, uses, strict=True)]


def take_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a pair's root: the function f, then this rank's heads."""
    state: InputState = vars(module)["tp_inputs"]
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
