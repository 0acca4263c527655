"""Running a model's forward without data: parameters, buffers and inputs as shapes on the `meta` device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, every parameter, buffer and plain tensor attribute of the modules is a meta tensor.

    Tensors that are one object stay one object. Afterwards, whatever happened, the very same objects are back, and
    parameters and buffers that were registered inside are gone.
    """
    replaced: dict[int, Tensor] = {}
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    originals: list[dict[str, Any]] = [dict(table) for table in tables]
    attributes = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    try:
        for table, original in zip(tables, originals, strict=True):
            table.update({name: _as_meta(value, replaced) for name, value in original.items() if value is not None})
        for module, name, value in attributes:
            object.__setattr__(module, name, _as_meta(value, replaced))
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.clear()
            table.update(original)
        for module, name, value in attributes:
            object.__setattr__(module, name, value)


def _as_meta(tensor: Tensor, replaced: dict[int, Tensor]) -> Any:
    if id(tensor) not in replaced:
        shape_only = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[id(tensor)] = nn.Parameter(shape_only, tensor.requires_grad) if is_parameter else shape_only
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
