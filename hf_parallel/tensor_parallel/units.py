"""Elements that stay together where ranks share a width they do not divide: as many as numbers of the model's code say, such as its heads.

Without torch, because memory is estimated with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final


NONE: Final[frozenset[int]] = frozenset()
# Elements: 16 bytes in 16 bit, which GPUs read at once. Products of other widths take slower kernels.
ALIGNED: Final = 8


def numbers_of(holders: Iterable[object]) -> frozenset[int]:
    """The integers above 1 that modules and configs hold, but for numbers of layers, which are no widths and not of every model like it."""
    named = (item for holder in holders for item in vars(holder).items())
    return frozenset(value for name, value in named if type(value) is int and value > 1 and "layer" not in name)


def unit_sizes(width: int, parts: int, numbers: Iterable[int]) -> list[int]:
    """Sizes that may have to stay together, in the order in which they are tried: the most even cut first, the coarsest size of those.

    Args:
        width: Elements that ranks share; where these are even, single elements come first.
        parts: Number of ranks.
        numbers: Numbers of the model's code, of which one may say how many units there are.
    """
    units = {1, *(width // count for count in numbers if parts <= count <= width and width % count == 0)}
    even = [1] if width % parts == 0 else []
    return even + sorted(units - {*even}, key=lambda unit: (most_of(width, parts, unit), -unit))


def largest_part(size: int, parts: int) -> int:
    """Elements of the first of some parts of consecutive elements, the longest: one that is even, or aligned where that costs next to nothing.

    Args:
        size: Elements in all.
        parts: Number of parts.
    """
    part = -(-size // parts)
    is_long = part >= ALIGNED * max(64, 2 * parts)
    return part + -part % ALIGNED if size % parts and is_long else part


def most_of(width: int, parts: int, unit: int = 1) -> int:
    """Elements of the rank with most, if no unit is cut.

    Args:
        width: Elements, heads or groups of heads.
        parts: Number of ranks.
        unit: Number of them that stay together; single ones are the most even.
    """
    return largest_part(width, parts) if unit == 1 else -(-(width // unit) // parts) * unit
