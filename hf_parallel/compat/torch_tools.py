"""Tools of torch that have no public name: pytrees, dispatch modes, fake tensors, operations on many tensors at once.

Apart from `private_torch`, which modules use that do not import torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.nn.modules.conv import _ConvNd as ConvModule
from torch.nn.modules.dropout import _DropoutNd as DropoutModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


__all__ = [
    "ConvModule",
    "DropoutModule",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "WeakStorage",
    "autocast_dtype",
    "draws",
    "is_elementwise",
    "is_traceable_wrapper_subclass",
    "mixes_elements",
    "own_shape",
    "parts_of",
    "pytree",
    "stored_bytes",
]

# Elementwise, or copies that leave every element in its place, without torch's tag for it.
PLACE_BY_PLACE = frozenset(
    {
        *("to", "clone", "detach", "float", "half", "bfloat16", "double", "long", "int", "bool", "type", "type_as"),
        *("cpu", "cuda", "contiguous", "zeros_like", "ones_like", "full_like", "empty_like", "copy", "fill", "zero"),
        *("masked_fill", "where", "rsub", "true_divide", "divide", "multiply", "subtract", "absolute", "negative"),
        *("ldexp", "isclose", "requires_grad", "as_subclass", "alias", "retain_grad", "pin_memory", "set", "deepcopy"),
        *(
            "to_copy",
            "lift_fresh",
            "share_memory",
            "greater",
            "less",
            "greater_equal",
            "less_equal",
            "not_equal",
            "fix",
            "clip",
            "expit",
        ),
    }
)
GETTERS = frozenset({Tensor.data.__get__, Tensor.grad.__get__, Tensor.real.__get__})  # type: ignore[attr-defined, union-attr]
RANDOM = frozenset(
    {"dropout", "alpha_dropout", "feature_alpha_dropout", "gumbel_softmax", "rrelu"}
)  # draw, without torch's tag for it
OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
OPERATORS |= {name: f"bitwise_{name}" for name in ("and", "or", "xor")}


def is_elementwise(func: object) -> bool:
    """Whether each element that a function or operation of torch gives was made of the elements in its place alone, and of numbers."""
    if isinstance(func, OpOverload):
        name = func.overloadpacket.__name__
        known = name.strip("_") in PLACE_BY_PLACE or (name.startswith("_foreach_") and _is_elementwise(name))
        return known or torch.Tag.pointwise in func.tags
    return func in GETTERS or _is_elementwise(getattr(func, "__name__", ""))


@functools.cache
def _is_elementwise(name: str) -> bool:
    bare = name.strip("_").removeprefix("foreach_")
    names = {bare, OPERATORS.get(bare, bare)}
    if name.startswith("__") and bare[:1] in ("r", "i"):  # operators with swapped sides, and in place
        names |= {bare[1:], OPERATORS.get(bare[1:], bare[1:])}
    return not names.isdisjoint(PLACE_BY_PLACE) or any(_has_tag(one, torch.Tag.pointwise) for one in names)


@functools.cache
def _has_tag(name: str, tag: torch.Tag) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    return any(tag in getattr(packet, overload).tags for overload in overloads)


def draws(func: object) -> bool:
    """Whether a function of torch takes numbers of a random generator."""
    name = getattr(func, "__name__", "")
    return _has_tag(name, torch.Tag.nondeterministic_seeded) or name in RANDOM


@functools.cache
def mixes_elements(func: object) -> bool:
    """Whether a function of torch makes tensors of other elements than those in the same place; not of one that draws."""
    name = getattr(func, "__name__", "")
    if is_elementwise(func) or draws(func):
        return False
    if isinstance(func, FunctionType):
        return func.__module__ in ("torch.nn.functional", "torch.functional")
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    schemas = [getattr(packet, overload)._schema for overload in overloads]
    return any("Tensor" in str(returned.type) for schema in schemas for returned in schema.returns)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """`target.copy_(source)` for each pair, in a few kernels."""
    torch._foreach_copy_(targets, sources)


def copy_scaled(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """`target.copy_(source).mul_(factor)` for each pair; on a CPU memory is read once, and a GPU gets few kernels."""
    if factor == 1.0 or targets[0].device.type != "cpu":
        copy_all(targets, sources)
        if factor != 1.0:
            scale_all(targets, factor)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.dtype == source.dtype:
            torch.mul(source, factor, out=target)
        else:
            target.copy_(source).mul_(factor)


def add_all(targets: list[Tensor], others: list[Tensor]) -> None:
    """`target.add_(other)` for each pair, in a few kernels."""
    torch._foreach_add_(targets, others)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Join the elements of tensors of one type and device, in one kernel; of a single tensor perhaps a view."""
    found: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return found


def scale_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """`tensor.mul_(factor)` for each, in a few kernels."""
    torch._foreach_mul_(tensors, factor)


def sent_to(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """Numbers of the host as f[n] on a device, which is not waited for: from pageable memory a copy would wait."""
    here = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def norms_of(tensors: list[Tensor], norm_type: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The norm of each tensor, in a few kernels; summed in `dtype`, if one is given."""
    return torch._foreach_norm(tensors, norm_type, dtype=dtype)


def move_values_only(model: nn.Module) -> None:
    """Let `model.to()` and its like cast tensors without values but leave them where they are: nowhere."""
    vars(model)["_apply"] = MethodType(_apply, model)


def move_everything(model: nn.Module) -> None:
    """Undo `move_values_only`."""
    vars(model).pop("_apply", None)


def _apply(model: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    def apply(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return fn(tensor)
        dtype = fn(torch.empty(0, dtype=tensor.dtype)).dtype
        return tensor if dtype == tensor.dtype else tensor.to(dtype)

    applied: nn.Module = type(model)._apply(model, apply, recurse)
    return applied


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Tensors that one of a wrapping kind (quantised values with their scales) consists of, by their names in it.

    Empty for plain tensors.
    """
    wraps: Callable[[object], bool] = is_traceable_wrapper_subclass  # its own type is an intersection that mypy denies
    if not wraps(tensor):
        return {}
    wrapping: Any = tensor
    names = wrapping.__tensor_flatten__()[0]
    return {name: part for name in names if isinstance(part := getattr(tensor, name), Tensor)}


def own_shape(tensor: Tensor) -> torch.Size:
    """The shape of the memory of a tensor whose class reports another one, that of the whole of which it is a part."""
    shape: torch.Size = Tensor.shape.__get__(tensor)  # type: ignore[attr-defined]
    return shape


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Dtype in which autocast computes a product with `x`; None without it."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else None


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor's values: those of its parts where it wraps others, whatever its own dtype says."""
    parts = parts_of(tensor)
    return sum(map(stored_bytes, parts.values())) if parts else tensor.nbytes


def sharing_memory(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Names of two tensors that are two objects in one memory; None if there are none. Fake tensors are at no address."""
    real = ((name, tensor) for name, tensor in named if tensor.numel() and not isinstance(tensor, FakeTensor))
    unique = {id(tensor): (name, tensor) for name, tensor in real}
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in unique.values())
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            return name, other
    return None
