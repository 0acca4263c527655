"""Tokens to the ranks of their experts and back, as autograd functions on plain local tensors, and the module that does it.

A module of experts takes hidden states, the experts chosen for each token and their weights, and returns for each token
the weighted sum of its experts. Such a module can be called on single (token, expert) choices, and so on those that
other ranks send. None of its code sees an expert that this rank does not have, whatever its implementation (a loop, a
grouped product, one that is registered with transformers).

Every rank of the group exchanges in every forward and every backward pass, also one whose experts no token has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_parallel.errors import RankMismatchError
from hf_parallel.tensor_parallel.layout import split_units
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import TPGroup, VirtualGroup, communicate
from hf_parallel.tensor_parallel.shard_plan import Routing


Group: TypeAlias = TPGroup
_HALF: Final = 32  # bits of a count


@dataclass(frozen=True)
class Journey:
    """Number of rows that go from this rank to each rank of a group, and that come from each.

    Args:
        group: The ranks.
        sent: To each rank, in rank order.
        arriving: From each rank, in rank order.
    """

    group: Group
    sent: list[int]
    arriving: list[int]

    @classmethod
    def agree(cls, group: Group, sent: Tensor, hooks: int = 0) -> Journey:
        """Tell each rank how many rows it gets; collective, and the one place of a layer where the host waits for the device.

        Args:
            group: The ranks.
            sent: Rows to each rank i[P].
            hooks: Gradients of this layer's experts that hooks wait for, of all ranks; they travel in the upper half of the counts.

        Raises:
            RankMismatchError: On every rank; another rank has hooks on other experts' gradients, or none.
        """
        even = [1] * group.size()
        arriving = _all_to_all(group, sent + (hooks << _HALF), even, even)
        there, told = torch.stack([sent, arriving]).tolist()
        if any(count >> _HALF != hooks for count in told):
            _refuse_hooks(group.size())
        return cls(group, there, [count & ((1 << _HALF) - 1) for count in told])

    def there(self, rows: Tensor) -> Tensor:
        """`rows` f[sum(sent) ...], sorted by their rank, sent; f[sum(arriving) ...] in the order of their senders. Collective."""
        return _all_to_all(self.group, rows, self.sent, self.arriving)

    def back(self, rows: Tensor) -> Tensor:
        """The inverse of `there`; collective."""
        return _all_to_all(self.group, rows, self.arriving, self.sent)


def _refuse_hooks(size: int) -> NoReturn:
    raise RankMismatchError(
        f"parameters of experts have gradient hooks (register_hook) on some of the {size} ranks that share the experts only (ep_size={size}): "
        "each has the gradients of its own, and all must run the hook to give it the whole. Code of a callback, a library or a loop "
        "registers hooks on some ranks only (wandb.watch on the main process). Do it on every rank, or leave it out (WANDB_WATCH=false)."
    )


def _all_to_all(group: Group, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
    if isinstance(group, VirtualGroup):
        messages, sizes = group.exchange(rows), group.exchange(torch.tensor(sent))
        here = group.rank()
        return torch.cat([message.split(size.tolist())[here] for message, size in zip(messages, sizes, strict=True)])
    found, given = rows.new_empty(sum(arriving), *rows.shape[1:]), rows.contiguous()
    communicate(group, given.nbytes, lambda bare: dist.all_to_all_single(found, given, arriving, sent, group=bare))
    return found


class _There(torch.autograd.Function):
    """Hidden states f[n H], weights f[n 1] and expert ids i[n 1], sorted by rank, to their ranks, in one message.

    Weights and ids are columns of the hidden states, as bits: what is copied keeps them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ids: Tensor, journey: Journey) -> tuple[Tensor, ...]:
        """Send rows; return those that arrive, f[m H], f[m 1] and i[m 1]."""
        ctx.journey, ctx.width = journey, rows.shape[1]
        wide = _columns(weights, rows)
        ctx.columns, ctx.dtypes = wide.shape[1], (weights.dtype, wide.dtype)
        found = journey.there(torch.cat([rows, wide, _columns(ids.int(), rows)], dim=1))
        hidden, bits, numbers = found.split([ctx.width, ctx.columns, found.shape[1] - ctx.width - ctx.columns], dim=1)
        arrived = _uncolumned(numbers, torch.int32).to(ids.dtype)
        ctx.mark_non_differentiable(arrived)
        return hidden.contiguous(), _uncolumned(bits, weights.dtype), arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients of rows and weights back to where these came from, in one message."""
        found = ctx.journey.back(torch.cat([rows, _columns(weights, rows)], dim=1))
        hidden, bits = found.split([ctx.width, ctx.columns], dim=1)
        return hidden, _uncolumned(bits, ctx.dtypes[0]), None, None


class _Back(torch.autograd.Function):
    """Sends the rows that experts made, f[m H], back to the ranks whose tokens they are of."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        """f[n H] in the order in which the rows were sent."""
        ctx.journey = journey
        return journey.back(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None]:
        """Send the gradients of the rows to the ranks of the experts."""
        return ctx.journey.there(rows), None


def _columns(values: Tensor, rows: Tensor) -> Tensor:
    """The bits of `values` [n 1] as columns of the dtype of `rows`, which may be narrower or as wide."""
    if values.element_size() < rows.element_size():
        values = values.to(rows.dtype if values.is_floating_point() else torch.int64)
    return values.contiguous().view(rows.dtype)


def _uncolumned(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_columns`."""
    wide = dtype
    if dtype.itemsize < bits.element_size():
        wide = bits.dtype if dtype.is_floating_point else torch.int64
    return bits.contiguous().view(wide).to(dtype)


@dataclass
class _DispatchState:
    """The experts of this rank; kept on the module as `ep_dispatch`."""

    rule: Routing
    starts: Tensor  # number of the first expert of each rank, i[P]
    group: Group
    hooks: int = 0  # gradients of its experts that hooks wait for

    def __deepcopy__(self, memo: dict[int, Any]) -> _DispatchState:
        """A copy of a model exchanges over the same group."""
        return self


def install_dispatch(module: nn.Module, rule: Routing, group: Group) -> None:
    """Let a module compute the experts of this rank, whose parameters it holds, for the tokens of all ranks. In place.

    Args:
        module: Takes hidden states, indices i[N K] and weights f[N K].
        rule: Arguments in which the module takes tokens and choices.
        group: Ranks that share the experts, at most as many as experts.
    """
    sizes = split_units(rule.experts, group.size(), 0)
    starts = torch.tensor([sum(sizes[:rank]) for rank in range(len(sizes))])
    put_over(module, "ep_dispatch", _DispatchState(rule, starts, group), _dispatched)


class ExpertHooks:
    """Tells the exchanges of a model how many hooks wait for gradients of their experts; in place of a message of its own."""

    def __init__(self, model: nn.Module) -> None:
        dispatched = {path: vars(module).get("ep_dispatch") for path, module in model.named_modules()}
        self._states = {path: state for path, state in dispatched.items() if state is not None}
        self._known: list[str] = []

    def tell(self, hooked: list[str]) -> None:
        """Note the names of the parameters whose gradients hooks wait for, before a forward pass."""
        if hooked == self._known:
            return
        self._known = list(hooked)
        for path, state in self._states.items():
            state.hooks = sum(name.startswith(f"{path}.") for name in hooked)


def _dispatched(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The weighted sum of its experts for each token, of the shape of the hidden states; collective over the group."""
    state: _DispatchState = self.ep_dispatch
    given: dict[str | int, Any] = dict([*enumerate(args), *kwargs.items()])
    rule = state.rule
    hidden, index, weights = given[rule.hidden], given[rule.index], given[rule.weights]
    starts = state.starts = state.starts.to(index.device)  # moved once
    flat = hidden.reshape(-1, hidden.shape[-1])  # (tokens, hidden)
    # Choices are sorted by their expert, and so by its rank; n is their number.
    chosen, order = index.reshape(-1).sort(stable=True)  # (n,) each
    # What lies beyond the last expert means none: the module knows it, on the last rank.
    target = torch.bucketize(chosen, starts, right=True) - 1
    sent = torch.zeros_like(starts).scatter_add_(
        0, target, torch.ones_like(target)
    )  # a count would wait for the device
    journey = Journey.agree(state.group, sent, state.hooks)
    rows, factors, ids = _There.apply(  # type: ignore[no-untyped-call]
        flat[order // index.shape[-1]],
        weights.reshape(-1, 1)[order],
        (chosen - starts[target]).unsqueeze(-1),
        journey,
    )
    count = len(rows)
    if not count:  # gradients of experts that no token has chosen are zero, not absent: their copies wait for them
        rows, factors, ids = _stand_in(rows), _stand_in(factors) + 1, ids.new_zeros(1, 1)
    given[rule.hidden], given[rule.index], given[rule.weights] = rows, ids.to(index.dtype), factors
    made = self.ep_dispatch_inner(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
    made = _Back.apply(made.reshape(-1, made.shape[-1])[:count], journey)  # type: ignore[no-untyped-call]
    unsorted = torch.empty_like(made).index_copy(0, order, made)  # (n, hidden)
    result: Tensor = unsorted.view(*index.shape, -1).sum(1)
    return result.reshape(*hidden.shape[:-1], result.shape[-1])


def _stand_in(none: Tensor) -> Tensor:
    """A row of zeros f[1 W] in the place of none f[0 W], to which gradients go all the same."""
    return none.sum(0, keepdim=True)
