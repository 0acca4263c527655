"""Matrix products of sharded linear layers, with what their backward passes do beside autograd's own.

A column layer sums the gradient of its input over the ranks. The first of the layers that read one tensor does so for
all of them: autograd runs it last, with the gradients of the others in hand. It starts the all-reduce, computes the
gradient of its own weight meanwhile, and waits (Megatron-LM's asynchronous gradient all-reduce: Narayanan et al. 2021,
arXiv:2104.04473). In a region that gathers a sequence the sum is the region's, and what is kept for the backward pass is
this rank's part of the input, gathered again there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_parallel.tensor_parallel.functions import Entered, SharedCopy, start_sum


def column_product(shared: SharedCopy, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """This rank's columns f[... out] of a linear layer; the gradient of `x` is summed over the ranks, once for all
    layers that read `x` one after the other.

    Args:
        shared: Of the model; it knows the last input.
        x: f[... in], equal on all ranks.
        weight: This rank's part, [out in], or [in out] if `transposed`.
        bias: f[out], this rank's part.
        transposed: How the weight is stored.
    """
    if not torch.is_grad_enabled():
        return F.linear(x, weight.t() if transposed else weight, bias)
    partial = shared.partial_of(x)
    if partial is not None:
        return _product(partial, weight, bias, transposed, shared, False, shared.entered)[0]
    copy = shared.find(x)
    if copy is None and x.requires_grad:
        out, copy = _product(x, weight, bias, transposed, shared, True)
        shared.keep(x, copy)
        return out
    return plain_product(shared, x if copy is None else copy, weight, bias, transposed)


def row_product(shared: SharedCopy, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """This rank's partial output f[... out] of a linear layer from its part of the input, f[... in]."""
    return plain_product(shared, x, weight, None, transposed)


def plain_product(shared: SharedCopy, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """A linear layer without communication, whose weight gradient may be put off; arguments as `column_product`."""
    if shared.deferral is None or not torch.is_grad_enabled():
        return F.linear(x, weight.t() if transposed else weight, bias)
    return _product(x, weight, bias, transposed, shared, False)[0]


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
    shared: SharedCopy,
    reduces: bool,
    entered: Entered | None = None,
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _Product.apply(x, weight, bias, transposed, shared, reduces, entered)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    """A linear layer, and its input again for the other layers that read it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        shared: SharedCopy,
        reduces: bool,
        entered: Entered | None,
    ) -> tuple[Tensor, Tensor]:
        # Autocast would remember a cast weight that was made in here, without a graph, for the use of everybody.
        dtype = _autocast_dtype(x)
        entry, matrix = x.to(dtype), weight.to(dtype if weight.dtype != torch.float64 else weight.dtype)
        ctx.save_for_backward(entry if entered is None else entered.shard, weight)
        ctx.again, ctx.entry_dtype = None if entered is None else entered.again, entry.dtype
        ctx.weight = weight if _is_plain(weight) else None
        ctx.dtype, ctx.transposed, ctx.shared, ctx.reduces = x.dtype, transposed, shared, reduces
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        out = F.linear(entry, matrix.t() if transposed else matrix, None if bias is None else bias.to(dtype))
        return out, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.reduces:
            ctx.shared.clear()
        gradient, others = grads
        x, weight = ctx.saved_tensors  # once: recomputed activations are handed out a single time
        to_input = _input_gradient(ctx, weight, gradient, others)
        wait = start_sum(to_input, ctx.shared.group) if ctx.reduces and to_input is not None else None
        if ctx.again is not None and gradient is not None and ctx.needs_input_grad[1]:
            x = ctx.again(x).to(ctx.entry_dtype)
        to_weight, to_bias = (None, None) if gradient is None else _parameter_gradients(ctx, x, weight, gradient)
        return to_input if wait is None else wait(), to_weight, to_bias, *[None] * 4


def _input_gradient(ctx: Any, weight: Tensor, gradient: Tensor | None, others: Tensor | None) -> Tensor | None:
    """In memory of its own, which may be written to; `others` is what the other readers of the input want of it."""
    if not ctx.needs_input_grad[0]:
        return None
    if gradient is None:
        return None if others is None else others.clone()
    matrix = weight.to(gradient.dtype)
    own = (gradient @ (matrix.t() if ctx.transposed else matrix)).to(ctx.dtype)
    total: Tensor = own if others is None else own.add_(others)
    return total


def _parameter_gradients(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    flat, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    to_weight = None
    if ctx.needs_input_grad[1]:
        left, right = (rows, flat) if ctx.transposed else (flat, rows)
        pending = None if ctx.shared.deferral is None or ctx.weight is None else ctx.shared.deferral.pending
        if pending is None:
            to_weight = (left.t() @ right).to(weight.dtype)
        else:
            pending.append((ctx.weight, left, right))
    to_bias = flat.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None and ctx.needs_input_grad[2] else None
    return to_weight, to_bias


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """What autocast computes a product with `x` in; the dtype of `x` without it."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is a parameter that nobody watches, so that its gradient may be added to later."""
    return type(weight) is nn.Parameter and not weight._backward_hooks and not weight._post_accumulate_grad_hooks
