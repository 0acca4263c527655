"""Private names of torch's DTensor, and what its methods do silently wrong.

All of these change DTensors of the whole process: the calls are the user's, on parameters and gradients, from anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_parallel.errors import UnsupportedError


DRAWS = (
    *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_", "bernoulli", "native_dropout"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_", "random_"),
)


def whole_numbers_of_parts() -> None:
    """Let `float(p.grad.sum())` of a DTensor give the sum over all ranks: torch 2.13 gives that of this rank's part.

    For all DTensors of this process, since the call is the user's, anywhere: a number that was right stays what it was.
    """
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        raise UnsupportedError(
            "numbers taken of partitioned tensors cannot be made whole: this torch keeps the functions of DTensor elsewhere. Use "
            "zero.stage 1 or 2 of the native engine, or torch 2.13."
        )

    def item(func: Any, args: Any, kwargs: Any) -> Any:
        value = args[0]
        partial = any(placement.is_partial() for placement in value.placements)
        return func(value.full_tensor() if partial else value.to_local())

    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, item)


def mark_rows_of_parts(kind: type) -> None:
    """Let views of a DTensor that are copies (rows of what is sharded by rows) be of class `kind`, a DTensor too."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them
    aten = torch.ops.aten

    def memory(tensor: Any) -> int:
        return int(tensor._local_tensor.untyped_storage().data_ptr())

    def view(func: Any, args: Any, kwargs: Any) -> Any:
        handlers.pop(func, None)  # while the stock one runs
        try:
            found = func(*args, **kwargs)
        finally:
            handlers[func] = view
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(args[0], kind) or memory(one) != memory(args[0]):
                one.__class__ = kind
        return found

    for func in (
        *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
        *(aten.view.default, aten._unsafe_view.default, aten.diagonal.default),
    ):
        handlers.setdefault(func, view)


def whole_draws_of_parts() -> None:
    """Let random numbers for a DTensor (`randn_like(p)`, `p.grad.normal_()`) be this rank's part of those drawn for the whole.

    torch 2.13 draws them for each part by itself on the CPU, which gives all ranks of one seed the same numbers.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def draw(func: Any, args: Any, kwargs: Any) -> Any:
        first = args[0]
        whole = [arg.full_tensor() if isinstance(arg, DTensor) and arg is not first else arg for arg in args]
        reads = not func._schema.name.endswith(("_like", "_"))  # probabilities, say
        device = first.to_local().device
        whole[0] = first.full_tensor() if reads else torch.empty(first.shape, dtype=first.dtype, device=device)
        drawn = func(*whole, **kwargs)
        if func._schema.is_mutable:
            first._local_tensor.copy_(_part_of(drawn, first)._local_tensor)
            return first
        many = drawn if isinstance(drawn, tuple) else (drawn,)
        parts = tuple(_part_of(one, first) if one.shape == first.shape else one for one in many)
        return parts if isinstance(drawn, tuple) else parts[0]

    for name in DRAWS:
        packet = getattr(torch.ops.aten, name)
        for func in (getattr(packet, overload) for overload in packet.overloads()):
            if torch.Tag.nondeterministic_seeded in func.tags:
                handlers.setdefault(func, draw)


def _part_of(whole: Tensor, like: Any) -> Any:
    """This rank's part of a tensor that every rank has."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def exchangeable_data_of_parts() -> None:
    """Let `p.grad.data = new` of a DTensor have its effect: torch 2.13 drops the new values and keeps the part as it was.

    For all DTensors of this process; what is assigned stays shared with its owner, as with plain tensors.
    """
    if "data" in vars(DTensor):
        return
    if "_local_tensor" not in DTensor.__slots__ or "_spec" not in DTensor.__slots__:
        raise UnsupportedError("this torch keeps the parts of a DTensor elsewhere: install torch >= 2.11,<2.14")
    stock: Any = Tensor.data

    def exchange(part: Any, new: Any) -> None:
        if not isinstance(new, DTensor) or new.shape != part.shape:
            kind = "a DTensor" if isinstance(new, DTensor) else "a plain tensor"
            raise UnsupportedError(
                f"tensor.data = {kind} of shape {tuple(new.shape)}, on a tensor of shape {tuple(part.shape)} that is shared out "
                "over replicas (zero.stage: 3 or engine: fsdp2). Assign what is computed from the tensor itself "
                "(torch.zeros_like(p.grad), p.grad * 2), or set zero.stage to 1 or 2 of the native engine."
            )
        alike: Any = new.redistribute(part.device_mesh, part.placements).detach()
        stock.__set__(part, alike)
        part._local_tensor, part._spec = alike._local_tensor, alike._spec

    DTensor.data = property(lambda part: stock.__get__(part), exchange)  # type: ignore[assignment]
