"""Notices code that reads values of tensors in Python: what it does next may depend on them, and be something else for other values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor

from hf_parallel.compat.torch_tools import pytree


READS: Final = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "item", "tolist", "numpy"}
    | {"equal", "allclose", "is_nonzero"}
)


class ValueReads:
    """Follows some tensors, and what is made of them, through functions of torch.

    Args:
        tensors: Tensors to begin with.

    Attributes:
        found: Whether a value was read.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._alive: list[Tensor] = list(tensors)  # an identity is taken again when its object is gone
        self._known = {id(tensor) for tensor in self._alive}
        self.found = False

    def note(self, func: Any, given: Any, out: Any) -> None:
        """Note a call of `func` with the arguments `given`, which returned `out`."""
        if any(id(leaf) in self._known for leaf in pytree.tree_leaves(given)):
            self.found = self.found or getattr(func, "__name__", "") in READS
            made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
            self._known |= {id(leaf) for leaf in made}
            self._alive += made
