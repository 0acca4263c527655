"""Whether tensor parallelism can cut the weights of experts, whose product reads rows of whole units of memory, and whether adapters are on these."""

from __future__ import annotations

import math
from typing import Final

from hf_parallel.memory.terms import ModelShape
from hf_parallel.memory.variant import USUAL_RANK


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


def have_adapters(shape: ModelShape) -> bool:
    """Whether adapters are so many that experts have them, too: of a usual rank on every matrix.

    PEFT puts them there where it is told to, or where a type's experts were linear layers once.
    """
    if not (shape.adapters and shape.experts and shape.expert_width):
        return False
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 4 * shape.hidden + 2 * queries + 2 * keys
    matrices = 2 + shape.gated
    count = shape.experts / (matrices * shape.hidden * shape.expert_width)
    # A gate and the way up are one stack.
    each = 2 * shape.hidden + matrices * shape.expert_width
    return shape.adapters >= USUAL_RANK * shape.layers * (attention + count * each)
