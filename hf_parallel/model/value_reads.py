"""Notices code in Python that looks at values of tensors, or at how many rows they have.

What it does next may depend on that, and be something else for other values and other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from hf_parallel.model.tensors import tensors_in


READS: Final = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "item", "tolist", "numpy"}
    | {"equal", "allclose", "is_nonzero", "__len__"}
)
ORDERS: Final = ("__lt__", "__le__", "__gt__", "__ge__")
ARITHMETIC: Final = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__neg__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__"),
)


class ValueReads:
    """Follows some tensors, and what is made of them, through functions of torch.

    Args:
        tensors: Tensors to begin with; their first dim is rows.

    Attributes:
        found: Whether a value was read, or a number of rows or elements compared.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._alive: list[Tensor] = list(tensors)  # an identity is taken again when its object is gone
        self._known = {id(tensor) for tensor in self._alive}
        self.found = False

    def note(self, func: Any, given: Any, out: Any) -> Any:
        """Note a call of `func`.

        Args:
            func: Function of torch.
            given: Its positional arguments, and those by name.
            out: What it returned.

        Returns:
            What the caller shall get: `out`, with numbers of rows that note when they are compared.
        """
        if not any(id(leaf) in self._known for leaf in tensors_in(given)):
            return out
        name = getattr(func, "__name__", "")
        self.found = self.found or name in READS
        made = tensors_in(out)
        self._known |= {id(leaf) for leaf in made}
        self._alive += made
        if isinstance(out, torch.Size) and out:
            return torch.Size((_Rows.of(out[0], self), *out[1:]))
        if name == "numel" or (name == "size" and _asks_for_rows(*given)):
            return _Rows.of(out, self)
        return out


def _asks_for_rows(args: Any, kwargs: Any) -> bool:
    tensor, dim = (*args, *kwargs.values())[:2]
    return bool(dim in (0, -tensor.ndim))


class _Rows(int):
    """A number of rows, or made of it, that notes when it decides something.

    Equal numbers do not count as compared: this is how code checks that tensors go together.
    """

    reads: ValueReads

    @classmethod
    def of(cls, value: int, reads: ValueReads) -> _Rows:
        """The number `value`."""
        rows = cls(value)
        rows.reads = reads
        return rows

    def __bool__(self) -> bool:
        self.reads.found = True
        return int.__bool__(self)

    def __eq__(self, other: object) -> bool:
        same = int.__eq__(self, other) is True
        self.reads.found = self.reads.found or not same
        return same

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def _noting(name: str) -> Callable[[_Rows, Any], Any]:
    compare = getattr(int, name)

    def compared(self: _Rows, other: Any) -> Any:
        self.reads.found = True
        return compare(self, other)

    return compared


def _following(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def computed(self: _Rows, *others: Any) -> Any:
        result = compute(self, *others)
        return _Rows.of(result, self.reads) if isinstance(result, int) else result

    return computed


for _name in ORDERS:
    setattr(_Rows, _name, _noting(_name))
for _name in ARITHMETIC:
    setattr(_Rows, _name, _following(_name))
