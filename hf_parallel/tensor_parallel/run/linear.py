"""Matrix products of sharded linear layers, with the collectives of their backward passes.

A column layer sums the gradient of its input over the ranks. The first of the layers that read one tensor does so for
all of them: autograd runs it last, with the gradients of the others in hand. It starts the all-reduce, computes the
gradient of its own weight meanwhile, and waits (Megatron-LM's asynchronous gradient all-reduce: Narayanan et al. 2021,
arXiv:2104.04473). In a region that gathers a sequence the sum is the region's, and what is kept for the backward pass is
this rank's part of the input, gathered again there.

Where partial sums are made in fp32 (`SharedCopy.widens`), the products of half-precision factors that will be summed over
the ranks are not rounded before: one process rounds a sum once, and so do the ranks.

Shapes are those of one rank: a column layer has (..., in) -> (..., out / tp), a row layer (..., in / tp) -> (..., out).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_parallel.compat.private_torch import accumulation_hooks, gradient_hooks
from hf_parallel.compat.torch_tools import autocast_dtype
from hf_parallel.tensor_parallel.run.functions import Entered, SharedCopy, WideSum, is_half, reduce_from_tp, start_sum


@dataclass(frozen=True)
class _Job:
    """Work that a product does beside its own.

    Args:
        reduces: Sum the gradient of its input over the ranks, for all readers of that input.
        entered: The region's gathered input that it reads, of which a part is kept.
        wide: The fp32 sum of the gradient of its input; the reader that `reduces` takes it from there.
        leaves_wide: Return the product in fp32.
    """

    reduces: bool = False
    entered: Entered | None = None
    wide: WideSum | None = None
    leaves_wide: bool = False


def column_product(shared: SharedCopy, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """This rank's columns f[... out] of a linear layer; the gradient of `x` is summed over the ranks, once for all
    layers that read `x` one after the other.

    Args:
        shared: Shared copy of the model; it knows the last input.
        x: f[... in], equal on all ranks.
        weight: This rank's part, [out in], or [in out] if `transposed`.
        bias: f[out], this rank's part.
        transposed: Whether the weight is stored (in, out).
    """
    if not torch.is_grad_enabled():
        return F.linear(x, weight.t() if transposed else weight, bias)
    is_wide = rounded_to(shared, x) is not None
    partial = shared.partial_of(x)
    if partial is not None:
        entered = shared.entered
        job = _Job(entered=entered, wide=entered.wide if entered is not None and is_wide else None)
        return _product(partial, weight, bias, transposed, shared, job)[0]
    copy = shared.find(x)
    if copy is None and x.requires_grad:
        wide = WideSum() if is_wide else None
        out, copy = _product(x, weight, bias, transposed, shared, _Job(reduces=True, wide=wide))
        shared.keep(x, copy, wide)
        return out
    if copy is not None and shared.wide is not None:
        return _product(copy, weight, bias, transposed, shared, _Job(wide=shared.wide))[0]
    return plain_product(shared, x if copy is None else copy, weight, bias, transposed)


def row_product(shared: SharedCopy, x: Tensor, weight: Tensor, transposed: bool, *, is_wide: bool = False) -> Tensor:
    """This rank's partial output f[... out] of a linear layer from its part of the input, f[... in]; fp32 if `is_wide`."""
    if is_wide:
        return _product(x, weight, None, transposed, shared, _Job(leaves_wide=True))[0]
    return plain_product(shared, x, weight, None, transposed)


def row_sum(shared: SharedCopy, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """The output of a row: the sum of all ranks' `row_product`."""
    dtype = rounded_to(shared, x)
    partial = row_product(shared, x, weight, transposed, is_wide=dtype is not None)  # (..., out), one of tp summands
    return reduce_from_tp(partial, shared.group, dtype=dtype)


def rounded_to(shared: SharedCopy, x: Tensor) -> torch.dtype | None:
    """The dtype to which fp32 sums over the ranks of products with `x` are rounded; None if sums are not widened."""
    dtype = autocast_dtype(x) or x.dtype
    return dtype if shared.widens and is_half(dtype) else None


def plain_product(shared: SharedCopy, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """A linear layer without communication, whose weight gradient may be put off; arguments as `column_product`."""
    if shared.deferral is None or not torch.is_grad_enabled():
        return F.linear(x, weight.t() if transposed else weight, bias)
    return _product(x, weight, bias, transposed, shared, _Job())[0]


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, shared: SharedCopy, job: _Job
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _Product.apply(x, weight, bias, transposed, shared, job)  # type: ignore[no-untyped-call]
    return result


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` f32[... N] of half-precision factors f[... K] and f[K N], with no rounding but that of fp32 sums.

    CUDA's matrix units do that at the usual speed. On a CPU both factors are copied to fp32.
    """
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda:
            flat = torch.mm(left.reshape(-1, left.shape[-1]), right, out_dtype=torch.float32)  # (rows, N)
            return flat.view(*left.shape[:-1], right.shape[-1])
        return left.float() @ right.float()


class _Product(torch.autograd.Function):
    """A linear layer, and its input again for the other layers that read it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, shared: SharedCopy, job: _Job
    ) -> tuple[Tensor, Tensor]:
        # Cast by hand: autocast caches the weights that it casts, and one that is cast in here has no graph. Later layers
        # that read the weight from the cache would get no gradient.
        dtype = autocast_dtype(x) or x.dtype
        entry, matrix = x.to(dtype), weight.to(dtype if weight.dtype != torch.float64 else weight.dtype)
        kept = entry if job.entered is None else job.entered.shard
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no input
        ctx.again, ctx.entry_dtype = None if job.entered is None else job.entered.again, entry.dtype
        ctx.weight = weight if _is_plain(weight) else None
        ctx.dtype, ctx.transposed, ctx.shared = x.dtype, transposed, shared
        # Without `entered`, which has the whole input: it would live as long as the graph, checkpointed or not.
        ctx.job = job if job.entered is None else replace(job, entered=None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        if job.leaves_wide:
            out = wide_product(entry, matrix if transposed else matrix.t())
        else:
            out = F.linear(entry, matrix.t() if transposed else matrix, None if bias is None else bias.to(dtype))
        # A view, because an output that is the input itself is no node of the graph: the other readers would bypass it.
        return out, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        job: _Job = ctx.job
        if job.reduces:
            ctx.shared.clear()
        gradient, others = grads
        if gradient is not None and job.leaves_wide:
            gradient = gradient.to(ctx.entry_dtype)  # as it came; autograd widens it like the output
        x, weight = (
            ctx.saved_tensors
        )  # only once: activation checkpointing gives a recomputed tensor to the first reader
        to_input = _input_gradient(ctx, weight, gradient, others)
        wait = start_sum(to_input, ctx.shared.group) if job.reduces and to_input is not None else None
        if ctx.again is not None and gradient is not None and ctx.needs_input_grad[1]:
            x = ctx.again(x).to(ctx.entry_dtype)
        to_weight, to_bias = (None, None) if gradient is None else _parameter_gradients(ctx, x, weight, gradient)
        total = to_input if wait is None else wait().to(ctx.dtype)
        return total, to_weight, to_bias, None, None, None


def _input_gradient(ctx: Any, weight: Tensor, gradient: Tensor | None, others: Tensor | None) -> Tensor | None:
    """Gradient of the input in new memory; `others` is the sum of the gradients of its other readers."""
    if not ctx.needs_input_grad[0]:
        return None
    if ctx.job.wide is not None:
        return _wide_input_gradient(ctx, weight, gradient, others)
    if gradient is None:
        return None if others is None else others.clone()
    matrix = weight.to(gradient.dtype)
    own = (gradient @ (matrix.t() if ctx.transposed else matrix)).to(ctx.dtype)  # (..., out) @ (out, in) -> (..., in)
    total: Tensor = own if others is None else own.add_(others)
    return total


def _wide_input_gradient(ctx: Any, weight: Tensor, gradient: Tensor | None, others: Tensor | None) -> Tensor | None:
    """The same in fp32, for the layer that sums over the ranks; the other layers add theirs to `job.wide`."""
    wide: WideSum = ctx.job.wide
    if gradient is not None:
        matrix = weight.to(gradient.dtype)
        wide.add(wide_product(gradient, matrix.t() if ctx.transposed else matrix))
    return wide.take(others) if ctx.job.reduces else None


def _parameter_gradients(
    ctx: Any, x: Tensor | None, weight: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    flat = gradient.reshape(-1, gradient.shape[-1])  # (rows, out)
    to_weight = None
    if x is not None:
        rows = x.reshape(-1, x.shape[-1])  # (rows, in)
        left, right = (rows, flat) if ctx.transposed else (flat, rows)
        pending = None if ctx.shared.deferral is None or ctx.weight is None else ctx.shared.deferral.pending
        if pending is None:
            to_weight = (left.t() @ right).to(weight.dtype)  # (out, in), or (in, out) if transposed
        else:
            pending.append((ctx.weight, left, right))
    to_bias = flat.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None and ctx.needs_input_grad[2] else None
    return to_weight, to_bias


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is a parameter without hooks, so that its gradient may be completed later."""
    return type(weight) is nn.Parameter and not gradient_hooks(weight) and not accumulation_hooks(weight)
