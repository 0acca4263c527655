"""How many attention heads the tensor-parallel rank with most has, where the ranks do not divide them."""

from __future__ import annotations

import math


def most_heads(heads: int, kv_heads: int, tp_size: int) -> tuple[int, int]:
    """Heads of queries and of keys and values on the rank with most.

    Ranks share whole groups of a key-value head and its queries. Where there are fewer of these than ranks, each rank has all
    projections of keys and values, and a part of the queries.

    Args:
        heads: Heads of queries.
        kv_heads: Heads of keys and values, a divisor of `heads`.
        tp_size: Ranks that share them.
    """
    if kv_heads < tp_size:
        return math.ceil(heads / tp_size), kv_heads
    own = math.ceil(kv_heads / tp_size)
    return own * (heads // kv_heads), own


def beyond_even(heads: int, kv_heads: int, tp_size: int) -> tuple[float, float]:
    """Shares of all heads that the rank with most has beyond an even part: of queries, of keys and values."""
    if tp_size == 1 or not (heads and kv_heads):
        return 0.0, 0.0
    own, kv_own = most_heads(heads, kv_heads, tp_size)
    return own / heads - 1 / tp_size, kv_own / kv_heads - 1 / tp_size
