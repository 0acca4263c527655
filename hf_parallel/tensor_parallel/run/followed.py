"""Tracks what user code computes from a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.torch_tools import pytree


class Followed(TorchFunctionMode):
    """Inside, follows marked tensors through the code that runs, by the memory that they reach.

    Attributes:
        read: Whether Python code looked at one of its values.
    """

    READS = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__"})
    WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Tensor] = {}  # memory is taken again when its tensor is gone
        self.read = False

    def mark(self, tensor: Tensor) -> None:
        """Follow this tensor too."""
        self._alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def reaches(self, value: Any) -> bool:
        """Whether `value` holds a tensor that was computed from those followed."""
        found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel()]
        return any(leaf.untyped_storage().data_ptr() in self._alive for leaf in found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._alive and self.reaches([args, kwargs]):
            name = getattr(func, "__name__", "")
            self.read = self.read or name in self.READS
            written = args[:1] if name in self.WRITES or (name.endswith("_") and not name.endswith("__")) else ()
            for leaf in pytree.tree_leaves([out, written]):
                if isinstance(leaf, Tensor) and leaf.numel():
                    self.mark(leaf)
        return out
