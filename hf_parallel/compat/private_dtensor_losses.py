"""Losses over torch's DTensors, as code of users writes them: on values that each rank has for itself, and beside plain numbers.

All of these change DTensors of the whole process: the calls are the user's, on parameters, from anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from hf_parallel.compat.private_dtensor import overloads_of, stock_result
from hf_parallel.compat.private_torch import in_backward_pass


# What takes numbers, or one number for a whole tensor, in a loss or in its backward pass.
NUMBERED = (
    *("add", "sub", "rsub", "mul", "div", "pow", "expand", "where", "lerp", "addcmul", "addcdiv", "fmod", "remainder"),
    *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "masked_fill", "threshold", "threshold_backward"),
)
# What makes one number of two, of a loss and a penalty over parts, say.
JOINED = ("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "add_", "sub_", "mul_", "div_")


def note_numbers_of_losses(note: Callable[[Tensor | float], None]) -> None:
    """Pass on the numbers that a loss, or its backward pass, computes tensors in parts with: each rank has its own for its part.

    Args:
        note: Gets them one by one, a tensor of one element as it is.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def noting(inner: Any) -> Any:
        def run(func: Any, args: Any, kwargs: Any) -> Any:
            found = stock_result(handlers, func, args, kwargs) if inner is None else inner(func, args, kwargs)
            if isinstance(found, DTensor) and found.ndim and (in_backward_pass() or _is_followed(args)):
                for number in map(_number_of, args):
                    if number is not None:
                        note(number)
            return found

        run.notes = True  # type: ignore[attr-defined]
        return run

    for func in overloads_of(NUMBERED):
        if not hasattr(handlers.get(func), "notes"):
            handlers[func] = noting(handlers.get(func))


def plain_numbers_beside_plain() -> None:
    """Let `loss + penalty`, of a plain number and one of parts, be this rank's loss plus the whole penalty, a plain number.

    In torch 2.13 it is a DTensor, whose value has the loss of another rank in it, and so is the gradient that `loss` gets, which its
    own backward pass refuses.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def joining(inner: Any) -> Any:
        def run(func: Any, args: Any, kwargs: Any) -> Any:
            parts = [arg for arg in args if isinstance(arg, DTensor) and arg.ndim == 0]
            plain = [arg for arg in args if type(arg) is Tensor and arg.ndim == 0]
            if not parts or not plain:
                return stock_result(handlers, func, args, kwargs) if inner is None else inner(func, args, kwargs)
            if func._schema.is_mutable and args[0] is parts[0]:  # stays one of parts
                _follow(plain, _whole_number)
                _make_whole(parts[0])
                return stock_result(handlers, func, args, kwargs)
            for part in parts:
                _follow([part], functools.partial(_on_every_rank, mesh=part.device_mesh))
            return func(*map(_whole_number, args), **kwargs)

        run.joins = True  # type: ignore[attr-defined]
        return run

    for func in overloads_of(JOINED):
        if not hasattr(handlers.get(func), "joins"):
            handlers[func] = joining(handlers.get(func))


def _follow(numbers: Sequence[Tensor], hook: Callable[[Tensor], Tensor]) -> None:
    for number in numbers:
        if number.requires_grad and torch.is_grad_enabled():
            number.register_hook(hook)


def _whole_number(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) and value.ndim == 0 else value


def _make_whole(number: Any) -> None:
    """In place: of what was this rank's summand."""
    if any(placement.is_partial() for placement in number.placements):
        alike = number.detach().redistribute(placements=[Replicate()] * number.device_mesh.ndim)
        number._local_tensor, number._spec = alike._local_tensor, alike._spec


def _on_every_rank(gradient: Tensor, mesh: Any) -> Tensor:
    """A number that every rank has, as a DTensor."""
    if isinstance(gradient, DTensor):
        return gradient
    return DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_followed(args: Sequence[object]) -> bool:
    """Whether a backward pass will follow what is computed."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _number_of(value: object) -> Tensor | float | None:
    """The number that an argument is on this rank; None of a larger tensor, and of one that ranks have summands of."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        return None
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        partial = any(placement.is_partial() for placement in value.placements)
        return value._local_tensor if value.ndim == 0 and not partial else None
    return value if value.numel() == 1 else None


def mean_gradients_of_wholes() -> None:
    """Let `p.full_tensor()` in a loss give parts the mean of the ranks' gradients: torch takes each rank's own for its part.

    For all DTensors of this process: gradients that are the same on all ranks are their mean, too.
    """
    stock = DTensor.full_tensor
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def full_tensor(part: Any, *, grad_placements: Any = None) -> Tensor:
        if grad_placements is not None or not _is_followed([part]):
            return stock(part, grad_placements=grad_placements)
        mesh = part.device_mesh
        whole = stock(part, grad_placements=[Partial()] * mesh.ndim)
        whole.register_hook(lambda gradient: gradient / mesh.size())
        return whole

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign, assignment]
