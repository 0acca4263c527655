"""Tensors inside the python values that modules take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor


# Of numbers of rows that are computed alone and together: kernels of other shapes round differently. No proof but a net.
ROWS_AGREE: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def map_tensors(
    fn: Callable[[tuple[str | int, ...], Tensor], Any], value: Any, path: tuple[str | int, ...] = ()
) -> Any:
    """`value` with `fn(path, tensor)` in place of every tensor in nested tuples, lists and dicts; others are kept."""
    if isinstance(value, Tensor):
        return fn(path, value)
    if type(value) is dict:
        return {key: map_tensors(fn, item, (*path, key)) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(fn, item, (*path, i)) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested mappings, tuples and lists (model outputs are mappings)."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def only_tensor(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """The input of a linear module: its first argument, positional or by whatever name its class gives it."""
    value: Tensor = args[0] if args else next(iter(named.values()))
    return value


def largest(tensor: Tensor) -> float:
    """The largest magnitude, NaN if there is one."""
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.layout != torch.strided:
        return float(tensor.abs().max())
    least, most = torch.aminmax(tensor)  # without a temporary of the tensor's size; both are NaN if any is
    return max(-float(least), float(most))


def as_integers(value: Tensor) -> Tensor:
    """The bits of a tensor as integers of the size of its elements, in one dimension."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
    return flat.view(_SAME_SIZE[flat.element_size()]) if flat.is_floating_point() else flat
