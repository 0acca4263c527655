"""Splitting a backward pass: gradients of the inputs now, gradients of the weights later.

Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) fill the pipeline's idle time with weight gradients. Almost all
of their cost is in the matrix products of linear layers, so only those are deferred: a backward is one ordinary pass
through the graph, in which a linear layer returns the gradient of its input and keeps (input, output gradient) for the
product that makes the gradient of its weight. Norms, biases, embeddings and experts are done at once; they are right
without being deferred. The graph is traversed once, so several payload tensors may share it (shared key-value states do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_parallel.compat.private_torch import Onlooker, accumulation_hooks, gradient_hooks


Pending = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weight p[out in] or p[in out], and the two factors f[rows a], f[rows b] of its gradient: left.T @ right."""


class WeightGradients:
    """Lets the linear layers of a model defer their weight gradients.

    Args:
        model: Its `nn.Linear` and `Conv1D` layers are changed in place: their forward computes the same. A layer whose
            weight has hooks, or is frozen, is left alone at each call: a hook has to see the gradient in the backward.

    Attributes:
        layers: Layers that take part.
        pending: Gets the factors of a backward; None when it computes weight gradients at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pending: Pending | None = None
        self.layers = 0
        for layer in model.modules():
            transposed = type(layer).forward is Conv1D.forward
            if transposed or type(layer).forward is nn.Linear.forward:
                layer.forward = _Deferring(self, layer, layer.forward, transposed)
                self.layers += 1

    @contextmanager
    def deferring(self) -> Iterator[Pending]:
        """Inside, backwards leave weight gradients to `accumulate`, which takes the list that this yields."""
        waiting: Pending = []
        self.pending = waiting
        try:
            yield waiting
        finally:
            self.pending = None


def accumulate(pending: Pending) -> None:
    """Compute the weight gradients that a backward deferred and add them to `.grad`; empties the list."""
    with torch.no_grad():
        while pending:
            weight, left, right = pending.pop()
            if weight.grad is not None and weight.grad.dtype == left.dtype:
                weight.grad.addmm_(left.t(), right)
                continue
            gradient = (left.t() @ right).to(weight.dtype)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


class _Deferring:
    """Forward of a linear layer that can defer its weight gradient."""

    def __init__(
        self, owner: WeightGradients, layer: nn.Module, forward: Callable[..., Tensor], transposed: bool
    ) -> None:
        self.owner, self.layer, self.forward, self.transposed = owner, layer, forward, transposed

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if not torch.is_grad_enabled() or not _is_plain(weight):
            return self.forward(x)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        elif x.dtype is not weight.dtype:
            return self.forward(x)  # which says what is wrong
        out: Tensor = _Product.apply(x, weight, bias, self.transposed, self.owner)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    """x f[... in] times a weight, p[out in] or (transposed) p[in out], plus a bias f[out]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool, owner: WeightGradients
    ) -> Tensor:
        # The weight itself is saved, not its copy in autocast's dtype: that would be one more copy a live microbatch.
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.has_bias, ctx.transposed, ctx.owner = weight, bias is not None, transposed, owner
        matrix = weight.to(x.dtype)
        return functional.linear(x, matrix.t() if transposed else matrix, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors  # f[... in], p[out in] or p[in out]
        matrix = weight.to(gradient.dtype)
        to_input = None
        if ctx.needs_input_grad[0]:
            to_input = gradient @ (matrix.t() if ctx.transposed else matrix)  # f[... out] -> f[... in]
        flat = gradient.reshape(-1, gradient.shape[-1])  # f[rows out]
        to_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None  # f[out]
        rows = x.reshape(-1, x.shape[-1])  # f[rows in]
        left, right = (rows, flat) if ctx.transposed else (flat, rows)
        pending = ctx.owner.pending
        to_weight = None
        if pending is not None:
            pending.append((ctx.weight, left, right))
        else:
            to_weight = (left.t() @ right).to(weight.dtype)  # of the weight's shape
        return to_input, to_weight, to_bias, None, None


def _is_plain(weight: Any) -> bool:
    """Whether a weight is a trained parameter that nobody watches."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and all(isinstance(hook, Onlooker) for hook in gradient_hooks(weight).values())
        and not accumulation_hooks(weight)
    )
