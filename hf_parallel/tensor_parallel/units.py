"""Elements that stay together where ranks share a width they do not divide: as many as numbers of the model's code say, such as its heads.

Without torch, because memory is estimated with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final


NONE: Final[frozenset[int]] = frozenset()


def numbers_of(holders: Iterable[object]) -> frozenset[int]:
    """The integers above 1 that modules and configs hold, but for numbers of layers, which are no widths and not of every model like it."""
    named = (item for holder in holders for item in vars(holder).items())
    return frozenset(value for name, value in named if type(value) is int and value > 1 and "layer" not in name)


def unit_sizes(width: int, parts: int, numbers: Iterable[int]) -> list[int]:
    """Sizes that may have to stay together, in the order in which they are tried: single elements if that is even, then coarse ones first.

    Args:
        width: Elements that ranks share.
        parts: Number of ranks.
        numbers: Numbers of the model's code, of which one may say how many units there are.
    """
    counts = sorted(count for count in numbers if parts <= count <= width and width % count == 0)
    return [*([1] if width % parts == 0 else []), *(width // count for count in counts), 1]


@functools.lru_cache(maxsize=1024)
def most_of(units: int, parts: int, numbers: frozenset[int]) -> float:
    """Units of the rank with most, if the first of `unit_sizes` that cuts between units is taken.

    Args:
        units: Elements, heads or groups of heads, none of which is cut.
        parts: Number of ranks.
        numbers: See `unit_sizes`.
    """
    if units % parts == 0:
        return units / parts
    unit = unit_sizes(units, parts, numbers)[0]
    return -(-(units // unit) // parts) * unit
