"""Losses over torch's DTensors, as code of users writes them: on values that each rank has for itself, and beside plain numbers.

All of these change DTensors of the whole process: the calls are the user's, on parameters, from anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Partial, Replicate

from hf_parallel.compat.private_dtensor import is_partial, overloads_of, part_of, stock_result
from hf_parallel.compat.private_torch import in_backward_pass


# What takes numbers, or one number for a whole tensor, in a loss or in its backward pass.
NUMBERED = (
    *("add", "sub", "rsub", "mul", "div", "pow", "expand", "where", "lerp", "addcmul", "addcdiv", "fmod", "remainder"),
    *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "masked_fill", "threshold", "threshold_backward"),
)
# What joins two tensors: a loss and a penalty over parts, say, or a part and older weights.
JOINED = ("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "add_", "sub_", "mul_", "div_")
ARITHMETIC = ("add", "sub", "rsub", "mul", "div")  # of those, whose gradients are made by them, too


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
                for number in map(number_of, args):
                    if number is not None:
                        note(number)
            return found

        vars(run).update({} if inner is None else vars(inner), notes=True)
        return run

    for func in overloads_of(NUMBERED):
        if not hasattr(handlers.get(func), "notes"):
            handlers[func] = noting(handlers.get(func))


def join_parts_and_plain_tensors(note: Callable[[Tensor | float], None]) -> None:
    """Let losses join parts, and numbers of them, with plain tensors: `loss + p.square().sum()`, `fisher * (p - older) ** 2`.

    Torch makes `loss + penalty` a DTensor, whose value has the loss of another rank in it, and so is the gradient that `loss` gets,
    which its own backward pass refuses: here it is a plain number, this rank's loss plus the whole penalty. Torch refuses
    plain tensors beside parts: here they are wholes, of which each rank takes its part.

    Args:
        note: Gets a number for each whole that a backward pass follows: ranks that have other ones would train other parts.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def joining(inner: Any, elements: bool) -> Any:
        def stock(func: Any, args: Any, kwargs: Any) -> Any:
            return stock_result(handlers, func, args, kwargs) if inner is None else inner(func, args, kwargs)

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            parts = [arg for arg in args if isinstance(arg, DTensor)]
            plain = _plain_of(args)
            if parts and plain and all(part.ndim == 0 for part in parts):
                return _joined_numbers(stock, func, args, kwargs)
            if elements and parts and any(one.numel() > 1 for one in plain):
                # In a backward pass the first one is the gradient.
                if _is_followed(parts) or (not _is_followed(plain) and args[0] is parts[0]):
                    return stock(func, _all_in_parts(args, parts[0], note), kwargs)
                return func(*map(_whole, args), **kwargs)
            return stock(func, args, kwargs)

        vars(run).update({} if inner is None else vars(inner), joins=True)
        return run

    for func in overloads_of(JOINED):
        if not hasattr(handlers.get(func), "joins"):
            handlers[func] = joining(handlers.get(func), func.overloadpacket.__name__ in ARITHMETIC)


def _joined_numbers(stock: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Compute with numbers of parts and plain tensors: a plain tensor."""
    parts = [arg for arg in args if isinstance(arg, DTensor)]
    if func._schema.is_mutable and args[0] is parts[0]:  # it stays one of parts
        _follow(_plain_of(args), _whole)
        _make_whole(parts[0])
        return stock(func, args, kwargs)
    for part in parts:
        _follow([part], functools.partial(_on_every_rank, mesh=part.device_mesh))
    return func(*map(_whole, args), **kwargs)


def _all_in_parts(args: Sequence[Any], like: Any, note: Callable[[Tensor | float], None]) -> list[Any]:
    """Plain tensors as this rank's parts; as they are where they are larger, or the sum of a tensor is not made yet."""
    wholes = [one for one in _plain_of(args) if one.numel() > 1]
    if is_partial(like) or any(torch.broadcast_shapes(one.shape, like.shape) != like.shape for one in wholes):
        return list(args)
    if _is_followed(args):
        _follow(wholes, _whole)
        for one in wholes:
            note(_mark(one))
    chosen = {id(one): part_of(one.detach().expand(like.shape), like) for one in wholes}
    return [chosen.get(id(arg), arg) for arg in args]


def _plain_of(args: Sequence[object]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, DTensor)]


@torch.no_grad()
def _mark(tensor: Tensor) -> Tensor:
    """A number for the elements of a tensor at their places: another one even if two elements of millions change places."""
    flat = tensor.reshape(-1).float()
    return (torch.arange(flat.numel(), device=flat.device, dtype=torch.float32).sin_() * flat).sum(dtype=torch.float64)


def _follow(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> None:
    """Change the gradients that tensors get of what is computed now."""
    for tensor in tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            handles: list[Any] = []

            def hook(gradient: Tensor, handles: list[Any] = handles) -> Tensor:
                for handle in handles:
                    handle.remove()
                return change(gradient)

            handle = tensor.register_hook(hook)
            if tensor.is_leaf:  # which stays, and would have more hooks after each pass
                handles.append(handle)


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    fixed: Any = value.detach()
    return fixed.full_tensor()


def _make_whole(number: Any) -> None:
    """Sum up, in place, what was this rank's summand."""
    if is_partial(number):
        alike = number.detach().redistribute(placements=[Replicate()] * number.device_mesh.ndim)
        number._local_tensor, number._spec = alike._local_tensor, alike._spec


def _on_every_rank(gradient: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank has, as a DTensor."""
    if isinstance(gradient, DTensor):
        return gradient
    return DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_followed(args: Sequence[object]) -> bool:
    """Whether a backward pass will follow what is computed."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def number_of(value: object) -> Tensor | float | None:
    """The number that an argument is on this rank; None of a larger tensor, and of one that ranks have summands of."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        return None
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        return value._local_tensor if value.ndim == 0 and not is_partial(value) else None
    return value if value.numel() == 1 else None


def gradients_in_parts(parameter: Any) -> object:
    """Let the gradient of a parameter in parts be in the same parts: that of `p.sum()` is whole on every rank in torch.

    Returns:
        What does it while it is kept.
    """

    def shared_out(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        gradient = gradients[0]
        if not isinstance(gradient, DTensor) or gradient.placements == parameter.placements:
            return None
        return (gradient.redistribute(placements=parameter.placements),)

    is_trained = parameter.requires_grad
    node = get_gradient_edge(parameter.requires_grad_(True)).node
    parameter.requires_grad_(is_trained)
    node.register_prehook(shared_out)
    return node


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
