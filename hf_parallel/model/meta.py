"""Running a model's forward without data: parameters, buffers and inputs as shapes on the `meta` device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_buffers, own_parameters
from hf_parallel.compat.private_transformers import masks_without_values


@contextlib.contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, every parameter, buffer and plain tensor attribute of the modules is a meta tensor.

    Tensors that are one object stay one object. Afterwards, whatever happened, the very same objects are back, and
    parameters and buffers that were registered inside are gone.
    """
    with _replaced(model, lambda tensor: tensor.detach().to("meta")), masks_without_values():
        yield


@contextlib.contextmanager
def off_meta(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, parameters and buffers that are on `meta` are zeros on `device`, those of parameters in next to no memory.

    For code that looks at values of its inputs (masks do) and at no weights. Afterwards as `on_meta`.
    """

    def zeros(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)  # may be written to
        if device.type == "cpu":
            # numpy takes zeroed pages from the system, which cost nothing until they are written to; torch writes zeros.
            return torch.from_numpy(np.zeros(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape)
        # Grouped products of experts check strides, and refuse those of an expanded zero.
        stored = tensor.shape[-2:] if tensor.ndim > 2 else torch.Size()
        return torch.zeros(stored, dtype=tensor.dtype, device=device).expand(tensor.shape)

    with _replaced(model, zeros):
        yield


@contextlib.contextmanager
def _replaced(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    replaced: dict[int, Tensor] = {}
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (own_parameters(module), own_buffers(module))
    ]
    originals: list[dict[str, Any]] = [dict(table) for table in tables]
    attributes = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    try:
        for table, original in zip(tables, originals, strict=True):
            table.update({name: _once(value, make, replaced) for name, value in original.items() if value is not None})
        for module, name, value in attributes:
            object.__setattr__(module, name, _once(value, make, replaced))
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.clear()
            table.update(original)
        for module, name, value in attributes:
            object.__setattr__(module, name, value)


def _once(tensor: Tensor, make: Callable[[Tensor], Tensor], replaced: dict[int, Tensor]) -> Any:
    if id(tensor) not in replaced:
        made = make(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return replaced[id(tensor)]


def inputs_on_meta(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with its tensors as meta tensors of the same shapes."""
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in sample.items()}


def longer_on_meta(sample: Mapping[str, Any], rows: int, length: int) -> dict[str, Any]:
    """A batch of meta tensors in which every (B, S, ...) of the sample has become (rows, length, ...).

    B and S are those of `input_ids`; without it the sample keeps its size.
    """
    grown = inputs_on_meta(sample)
    ids = grown.get("input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        for name, value in grown.items():
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
                grown[name] = torch.empty((rows, length, *value.shape[2:]), dtype=value.dtype, device="meta")
    return grown
