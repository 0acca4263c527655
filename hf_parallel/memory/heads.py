"""How many attention heads the tensor-parallel rank with most has, where the ranks do not divide them, and which tensors are of heads."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

from hf_parallel.tensor_parallel.units import NONE, most_of, unit_sizes


@functools.lru_cache(maxsize=1024)
def most_heads(heads: int, kv_heads: int, tp_size: int, numbers: frozenset[int] = NONE) -> tuple[int, int]:
    """Heads of queries and of keys and values on the rank with most.

    Ranks share the queries as evenly as each may have as many of them for one key-value head as for another. Where there are fewer of
    these than ranks, each rank has all projections of keys and values.

    Args:
        heads: Heads of queries.
        kv_heads: Heads of keys and values, a divisor of `heads`.
        tp_size: Ranks that share them.
        numbers: Numbers of the module, and of its config.
    """
    units = unit_sizes(heads, tp_size, numbers | {kv_heads})
    unit = next((one for one in units if _reads_evenly(heads, heads // kv_heads, tp_size, one)), 1)
    own = most_of(heads, tp_size, unit)
    return own, kv_heads if kv_heads < tp_size else own * kv_heads // heads


def _reads_evenly(heads: int, group: int, tp_size: int, unit: int) -> bool:
    """Whether each rank has as many queries of each key-value head that it reads, which `group` of them belong to."""
    each, more = divmod(heads // unit, tp_size)
    ends = [0, *accumulate(unit * (each + (rank < more)) for rank in range(tp_size))]
    read = (Counter(head // group for head in range(*ends_of_rank)) for ends_of_rank in pairwise(ends))
    return all(len(set(counts.values())) == 1 for counts in read)


def beyond_even(heads: int, kv_heads: int, tp_size: int, numbers: frozenset[int] = NONE) -> tuple[float, float]:
    """Shares of all heads that the rank with most has beyond an even part: of queries, of keys and values; see `most_heads`."""
    if tp_size == 1 or not (heads and kv_heads):
        return 0.0, 0.0
    own, kv_own = most_heads(heads, kv_heads, tp_size, numbers)
    return own / heads - 1 / tp_size, kv_own / kv_heads - 1 / tp_size


def sharing(heads: int, kv_heads: int, tp_size: int, numbers: frozenset[int] = NONE) -> float:
    """Number by which a tensor of so many heads is divided on the rank with most of it.

    Args:
        heads: Heads of the tensor: those of queries, or those of keys and values, of which no rank computes with all.
        kv_heads: Heads of keys and values.
        tp_size: Ranks that share them.
        numbers: See `most_heads`.
    """
    if heads == kv_heads:
        return heads / most_of(heads, tp_size)
    return heads / most_heads(heads, kv_heads, tp_size, numbers)[0]


def heads_of(shape: tuple[int, ...], text: Any) -> tuple[int, int]:
    """Number of heads that a tensor is of, and of those of keys and values; zeros if it is of none."""
    queries, keys = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(queries, int) or queries < 1:
        return 0, 0
    keys = keys if isinstance(keys, int) and 0 < keys <= queries else queries
    return next(((heads, keys) for heads in (queries, keys) if _is_of_heads(shape, heads, text)), (0, 0))


def _is_of_heads(shape: tuple[int, ...], heads: int, text: Any) -> bool:
    """Whether a tensor has the keys or values of so many heads: (..., heads * width), or (batch, heads, tokens, width or its half).

    Or their scores: ([batch,] heads, tokens, tokens).
    """
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if len(shape) > 2 and heads > 1 and shape[-3] == heads and shape[-2] == shape[-1]:
        return True
    if len(shape) == 4:
        return shape[1] == heads and shape[3] in (width, width // 2)
    return len(shape) in (2, 3) and shape[-1] == heads * width
