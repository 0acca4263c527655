"""Errors that compression made, kept by parameter name until they are sent.

A rank keeps what its messages left out. Over all ranks: sum of what was applied + sum of the residuals = sum of the
gradients, at any time. By name, because the buckets of one run are not those of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """The attributes that are read of a bucket."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Positions in the flat buffer where the parameters begin."""

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of its parameters."""

    @property
    def numel(self) -> int:
        """Elements of the buffer."""


class ErrorFeedback:
    """Residuals of the parameters whose gradients go through one wire.

    Args:
        dtype: Dtype of the residuals, fp32 or bf16.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._flat: dict[tuple[tuple[str, ...], int, int], Tensor] = {}
        self._layouts: dict[tuple[tuple[str, ...], int, int], tuple[tuple[int, ...], tuple[torch.Size, ...]]] = {}
        self._loaded: dict[str, Tensor] = {}

    def residual(self, bucket: Layout, start: int, length: int, device: torch.device) -> Tensor:
        """Elements [start, start + length) of the bucket's residual, dtype[length]; to be overwritten in place.

        Args:
            bucket: The bucket.
            start: First element.
            length: Number of elements; those behind the bucket's end are padding.
            device: Device of the residual.
        """
        key = (bucket.names, start, length)
        if key not in self._flat:
            self._relay(bucket.names)
            flat = torch.zeros(max(bucket.numel, start + length), dtype=self.dtype, device=device)
            for name, offset, shape in zip(bucket.names, bucket.offsets, bucket.shapes, strict=True):
                known = self._loaded.pop(name, None)
                if known is not None:
                    flat[offset : offset + shape.numel()] = known.reshape(-1).to(device)
            self._layouts[key] = (tuple(bucket.offsets), tuple(bucket.shapes))
            self._flat[key] = flat[start : start + length].clone()
        return self._flat[key]

    def _relay(self, names: Sequence[str]) -> None:
        """Move residuals of these parameters from buckets of another layout to the ones to be taken up."""
        wanted = set(names)
        for key in [key for key in self._flat if wanted & set(key[0])]:
            self._loaded |= self._by_name(key)
            del self._flat[key], self._layouts[key]

    def _by_name(self, key: tuple[tuple[str, ...], int, int]) -> dict[str, Tensor]:
        names, start, length = key
        offsets, shapes = self._layouts[key]
        found = {}
        for name, offset, shape in zip(names, offsets, shapes, strict=True):
            whole = torch.zeros(shape.numel(), dtype=self.dtype, device=self._flat[key].device)
            low, high = max(offset, start), min(offset + shape.numel(), start + length)
            if low < high:
                whole[low - offset : high - offset] = self._flat[key][low - start : high - start]
            found[name] = whole.view(shape)
        return found

    def state(self) -> dict[str, Tensor]:
        """Parameter name -> residual in its shape."""
        found = dict(self._loaded)
        for key in self._flat:
            found |= self._by_name(key)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up residuals; they replace what is there."""
        self._flat.clear()
        self._layouts.clear()
        self._loaded = {name: tensor.to(self.dtype) for name, tensor in state.items()}

    def norm(self) -> float:
        """L2 norm of all residuals of this rank."""
        parts = [tensor.float() for tensor in (*self._flat.values(), *self._loaded.values())]
        return float(torch.stack([part.norm() for part in parts]).norm()) if parts else 0.0
