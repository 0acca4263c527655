"""Autograd functions that scatter and gather a sequence over tensor-parallel ranks.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2): an all-reduce is a reduce-scatter and an all-gather, and
between the two each rank needs a part of the sequence only. Parts may differ in size; collectives pad them to the
largest. Every collective of a sequence goes through `all_gather_along` and `reduce_scatter_along`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_parallel.compat.private_collectives import reduce_scatter_flat, wait_for
from hf_parallel.compat.private_torch import base_of
from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import split_units
from hf_parallel.tensor_parallel.run.functions import (
    TPGroup,
    VirtualGroup,
    WideSum,
    communicate,
    gather_over,
    is_half,
    sum_over,
)


def sequence_sizes(length: int, group: TPGroup) -> list[int]:
    """Positions of a sequence of `length` >= group size on each rank: as even as they can be, the first ones longer."""
    return split_units(length, group.size(), 0)


def scatter_to_sequence(x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's positions of `x` forward, in memory of their own; all-gather of the gradient backward.

    Args:
        x: f[... S ...], equal on all ranks; so is its gradient.
        group: The tensor-parallel group; all its ranks must call this.
        dim: The sequence dim.
        sizes: Positions of every rank; they sum to S.
    """
    result: Tensor = _Scatter.apply(x, group, dim, sizes)  # type: ignore[no-untyped-call]
    return result


def gather_from_sequence(x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int], *, sums: bool) -> Tensor:
    """All positions forward, by an all-gather.

    Args:
        x: f[... sizes[rank] ...], this rank's positions.
        group: The tensor-parallel group; all its ranks must call this.
        dim: The sequence dim.
        sizes: Positions of every rank.
        sums: Whether the gradient is partial on each rank, and is reduce-scattered backward; False: it is equal on all
            ranks, and each takes its positions.
    """
    result: Tensor = _Gather.apply(x, group, dim, sizes, sums)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter_to_sequence(
    x: Tensor,
    group: TPGroup,
    dim: int,
    sizes: Sequence[int],
    *,
    widens: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's positions of the sum of `x` over the ranks forward, all-gather of the gradient backward.

    Args:
        x: f[... S ...], this rank's partial sum.
        group: The tensor-parallel group; all its ranks must call this.
        dim: The sequence dim.
        sizes: Positions of every rank; they sum to S.
        widens: Whether half-precision tensors are summed in fp32.
        dtype: Dtype of the result; None for that of `x`.
    """
    result: Tensor = _ReduceScatter.apply(x, (group, dim, sizes), widens, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return result


def copies_to_tp(tensors: Sequence[Tensor], group: TPGroup, *, widens: bool = False) -> list[Tensor]:
    """`copy_to_tp` of several tensors, with one all-reduce of all their gradients per dtype."""
    if not torch.is_grad_enabled():
        return list(tensors)
    return list(_Copies.apply(group, widens, *tensors))  # type: ignore[no-untyped-call]


class Entry:
    """Input of a region, gathered once for all of its readers: `full` for those that compute the same on every rank,
    a copy for those that compute parts (see `find`). Backward, gradients of the first are narrowed and those of the
    second reduce-scattered.

    A layer may keep `shard` in place of the gathered tensor, and gather it `again` in the backward pass.

    Args:
        x: f[... sizes[rank] ...], this rank's positions.
        group: The tensor-parallel group; all its ranks must make this.
        dim: The sequence dim.
        sizes: Positions of every rank.
        widens: Whether half-precision gradients are summed in fp32.

    Attributes:
        wide: The fp32 sum for gradients of layers that compute parts; None: they return them.
    """

    def __init__(self, x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int], *, widens: bool = False) -> None:
        self.shard = x.detach()
        again = _Again(group, dim, sizes)
        self.again: Callable[[Tensor], Tensor] = again
        self.wide = WideSum() if widens and x.dtype is not torch.float64 else None
        entered: tuple[Tensor, Tensor] = _Enter.apply(x, again, self.wide)  # type: ignore[no-untyped-call]
        self.full, self._partial = entered

    def find(self, x: Tensor) -> Tensor | None:
        """The copy for partial gradients, in the shape of `x`, if `x` is the gathered input or a reshape of it."""
        if x is self.full:
            return self._partial
        if base_of(x) is not self.full or x.numel() != self.full.numel() or not x.is_contiguous():
            return None
        return self._partial.view(x.shape)


class _Again:
    """Gathers a part at most once per backward pass."""

    def __init__(self, group: TPGroup, dim: int, sizes: Sequence[int]) -> None:
        self.group, self.dim, self.sizes = group, dim, sizes
        self.full: Tensor | None = None

    def __call__(self, shard: Tensor) -> Tensor:
        if self.full is None:
            self.full = all_gather_along(shard, self.group, self.dim, self.sizes)
        return self.full


def all_gather_along(x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    """The ranks' `x` one after the other along `dim`, in new memory; outside autograd. One all-gather.

    `x` may have batch and sequence folded into its first dim, [B * sizes[rank], H], with `dim` 1; so has the result.
    """
    whole = unfolded(x, dim, sizes[group.rank()])  # (batch, seq / tp, hidden)
    parts = gather_over(_padded(whole, dim, max(sizes)), group)
    # Without the padding: (batch, seq, hidden).
    full = torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
    return full if whole is x else full.flatten(0, 1)


def reduce_scatter_along(x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int], *, widens: bool = False) -> Tensor:
    """This rank's positions along `dim` of the sum of the ranks' `x`, in new memory; outside autograd.

    `x` may be folded, [B * S, H]. A half-precision tensor is summed in fp32 if it `widens`.
    """
    if widens and is_half(x.dtype):
        return reduce_scatter_along(x.float(), group, dim, sizes).to(x.dtype)
    if isinstance(group, VirtualGroup):
        return _own(sum_over(x, group), group, dim, sizes)
    whole = unfolded(x, dim, sum(sizes))  # (batch, seq, hidden)
    pieces = torch.stack([_padded(piece, dim, max(sizes)) for piece in whole.split(list(sizes), dim)])
    total = torch.empty_like(pieces[0])  # pieces (tp, batch, longest part, hidden), total one of them

    def scatter(bare: ProcessGroup) -> None:
        wait_for(reduce_scatter_flat(total.view(-1), pieces.view(-1), bare), bare)

    communicate(group, pieces.nbytes, scatter)
    total = total.narrow(dim, 0, sizes[group.rank()]).contiguous()
    return total if whole is x else total.flatten(0, 1)


def unfolded(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` itself, or [B, length, H] of a folded [B * length, H]."""
    return x.reshape(-1, length, x.shape[-1]) if dim == 1 and x.ndim == 2 else x


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x
    if x.shape[dim] > size:
        raise PlanError(
            f"a tensor of shape {tuple(x.shape)} is no part of a sequence: it has more than {size} positions."
        )
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _own(x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    rank = group.rank()
    whole = unfolded(x, dim, sum(sizes))
    own = whole.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)
    return own if whole is x else own.flatten(0, 1)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.along = group, dim, sizes
        return _own(
            x, group, dim, sizes
        ).detach()  # new memory: a model may change it in place, which views of `x` forbid

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather_along(grads[0], *ctx.along), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, dim: int, sizes: Sequence[int], sums: bool) -> Tensor:
        ctx.along, ctx.sums = (group, dim, sizes), sums
        return all_gather_along(x, group, dim, sizes).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = reduce_scatter_along if ctx.sums else _own
        return back(grads[0], *ctx.along), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, along: tuple[TPGroup, int, Sequence[int]], widens: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.along = along
        return reduce_scatter_along(x, *along, widens=widens).to(dtype).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather_along(grads[0], *ctx.along), None, None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, again: _Again, wide: WideSum | None) -> tuple[Tensor, Tensor]:
        ctx.again, ctx.wide, ctx.dtype = again, wide, x.dtype
        ctx.set_materialize_grads(False)
        full = all_gather_along(x, again.group, again.dim, again.sizes)
        return full, full.detach()  # two outputs of one memory: each has a gradient of its own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        again: _Again = ctx.again
        again.full = None
        along = again.group, again.dim, again.sizes
        whole, partial = grads
        if ctx.wide is not None:
            partial = ctx.wide.take(partial)
        total = None if partial is None else reduce_scatter_along(partial, *along).to(ctx.dtype)
        if whole is not None:
            own = _own(whole, *along)
            total = own if total is None else total.add_(own)
        return total, None, None


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TPGroup, widens: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.widens = group, widens
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed: list[Tensor | None] = [None] * len(grads)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            chosen = [i for i, grad in enumerate(grads) if grad.dtype == dtype]
            flat = sum_over(torch.cat([grads[i].flatten() for i in chosen]), ctx.group, widens=ctx.widens)
            for i, part in zip(chosen, flat.split([grads[i].numel() for i in chosen]), strict=True):
                summed[i] = part.view(grads[i].shape)
        return (None, None, *summed)
