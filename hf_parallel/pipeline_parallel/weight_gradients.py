"""Splitting a backward pass: gradients of the inputs now, gradients of the weights later.

Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) fill the pipeline's idle time with weight gradients. Almost all
of their cost is in the matrix products of linear layers, so those alone are put off: a backward is one ordinary walk
through the graph, in which a linear layer returns the gradient of its input and keeps (input, output gradient) for the
product that makes the gradient of its weight. Norms, biases, embeddings and experts are done at once; they are right
without being put off. The graph is walked once, so several payload tensors may share it (shared key-value states do).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


Pending = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weight p[out in] or p[in out], and the two factors f[rows a], f[rows b] of its gradient: left.T @ right."""


class WeightGradients(TorchFunctionMode):
    """While entered, linear layers of parameters can put off their weight gradients.

    Enter it around forwards and backwards (a checkpointed block runs its forward again in the backward), and start those
    with `torch.autograd.backward`: the mode is off inside the method of a tensor. Only a parameter without hooks takes
    part: a hook would have to see the gradient during the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: Pending | None = None

    @contextmanager
    def deferring(self) -> Iterator[Pending]:
        """Inside, backwards leave weight gradients to `accumulate`, which takes the list that this yields."""
        self._pending = []
        try:
            yield self._pending
        finally:
            self._pending = None

    @property
    def pending(self) -> Pending | None:
        """Where a backward puts the factors; None when it computes weight gradients at once."""
        return self._pending

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and torch.is_grad_enabled():
            call = _PRODUCTS[func](*args, **(kwargs or {}))
            if call is not None:
                with torch._C.DisableTorchFunction():
                    return self._product(*call)
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        elif x.dtype is not weight.dtype:
            raise TypeError(f"a product of {x.dtype} and {weight.dtype} outside autocast: give both one dtype.")
        out: Tensor = _Product.apply(x, weight, bias, transposed, self)  # type: ignore[no-untyped-call]
        return out


def accumulate(pending: Pending) -> None:
    """Compute the weight gradients that a backward put off and add them to `.grad`; empties the list."""
    with torch.no_grad():
        while pending:
            weight, left, right = pending.pop()
            if weight.grad is not None and weight.grad.dtype == left.dtype:
                weight.grad.addmm_(left.t(), right)
                continue
            gradient = (left.t() @ right).to(weight.dtype)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


class _Product(torch.autograd.Function):
    """x f[... in] times a weight, p[out in] or (transposed) p[in out], plus a bias f[out]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool, mode: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.has_bias, ctx.transposed, ctx.mode = weight, bias is not None, transposed, mode
        matrix = weight.to(x.dtype)
        return functional.linear(x, matrix.t() if transposed else matrix, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        matrix = weight.to(gradient.dtype)
        to_input = gradient @ (matrix.t() if ctx.transposed else matrix) if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, gradient.shape[-1])
        to_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        rows = x.reshape(-1, x.shape[-1])
        left, right = (rows, flat) if ctx.transposed else (flat, rows)
        pending = ctx.mode.pending
        to_weight = None
        if pending is not None:
            pending.append((ctx.weight, left, right))
        else:
            to_weight = (left.t() @ right).to(weight.dtype)
        return to_input, to_weight, to_bias, None, None


def _defers(x: Any, weight: Any) -> bool:
    """Whether a product is one of a plain tensor and a trained parameter that nobody watches."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.ndim == 2
        and type(x) is Tensor
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    )


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...] | None:
    return (input, weight, bias, False) if _defers(input, weight) else None


def _of_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> tuple[Any, ...] | None:
    return (mat1, mat2, input, True) if _defers(mat1, mat2) and not scales and input.ndim == 1 else None


def _of_matmul(input: Tensor, other: Tensor, **options: Any) -> tuple[Any, ...] | None:
    return (input, other, None, True) if _defers(input, other) and not options and input.ndim > 1 else None


_PRODUCTS: Final = {
    functional.linear: _of_linear,
    torch.addmm: _of_addmm,
    torch.matmul: _of_matmul,
    torch.mm: _of_matmul,
    Tensor.matmul: _of_matmul,
    Tensor.__matmul__: _of_matmul,
}
