"""Whether tensor parallelism can cut the weights of experts, whose product reads rows of whole units of memory."""

from __future__ import annotations

import math
from typing import Final


# torch's grouped product takes matrices whose rows begin at multiples of 16 bytes. A plan tries the parts in fp32.
UNIT: Final = 16 // 4


def stay_whole(width: float, tp_size: int) -> bool:
    """Whether every tensor-parallel rank keeps all experts, because some rank's part of their width is no whole number of units.

    Args:
        width: Width of the feed-forward part of one expert; 0 without experts.
        tp_size: Ranks that would share it: the first ones have parts of one size, a last one what is left.
    """
    if not width or tp_size == 1:
        return False
    part = math.ceil(width / tp_size)
    return bool(part % UNIT or width % part % UNIT)
