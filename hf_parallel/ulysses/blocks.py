"""Attention of some queries to one block of the keys, with what merges blocks exactly: the log-sum-exp of each query's scores.

Plain math, some rows of queries at a time, so that no more than `TILE` scores exist at once.

Extents: B batch, H heads, K key-value heads, G queries of a key-value head, N queries, M keys, D width of a key, W of a value.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), sections 3.1.1 (merging) and 3.1.2 (backward from the saved log-sum-exp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


TILE = 2**25  # scores: 128 MB in fp32
EVENLY = 2


@dataclass(frozen=True)
class Block:
    """Keys that some queries attend to.

    Args:
        key: f[B K M D].
        value: f[B K M W].
        mask: b or i[B 1|H N M], 0 where a query does not see a key, 1 where it does, `EVENLY` where its score counts as 0; None if
            all see all.
        is_causal: Whether query i sees keys 0 .. i only; without a mask.
        scale: Factor of the scores.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float


def attend(query: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Attention to one block.

    Args:
        query: f[B H N D].
        block: Its keys and values.

    Returns:
        Output f[B H N W] and log-sum-exp of the scores f[B H N], in at least fp32; zeros and -inf for a query that sees no key.
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(*query.shape[:-1], block.value.shape[-1], dtype=kind)
    sums = query.new_empty(query.shape[:-1], dtype=kind)
    for rows, seen in _tiles(query, block):
        scores = _scores(_grouped(query[:, :, rows], block), block, rows, seen)  # (batch, kv heads, group, rows, seen)
        total = scores.logsumexp(-1)
        weights = (scores - _finite(total)[..., None]).exp_()
        output[:, :, rows] = _times(weights.to(block.value.dtype), block.value[:, :, :seen]).flatten(1, 2)
        sums[:, :, rows] = total.flatten(1, 2)
    return output, sums


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to two blocks together, of what `attend` gives of each."""
    total = torch.logaddexp(one[1], other[1])
    first, second = ((sums - _finite(total)).exp_()[..., None] for _, sums in (one, other))
    return one[0] * first + other[0] * second, total


def attend_backward(
    query: Tensor, block: Block, grad: Tensor, sums: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through one block, from scores that are computed again.

    Args:
        query: f[B H N D].
        block: Its keys and values.
        grad: Gradient of the merged output, f[B H N W].
        sums: Log-sum-exp over all blocks, f[B H N].
        products: Merged output times its gradient, summed over the width, f[B H N].

    Returns:
        What the block adds to the gradients of query, key and value, in at least fp32.
    """
    kind = sums.dtype
    to_query = torch.zeros_like(query, dtype=kind)
    to_key, to_value = torch.zeros_like(block.key, dtype=kind), torch.zeros_like(block.value, dtype=kind)
    finite = _finite(sums)
    for rows, seen in _tiles(query, block):
        queries, grads, total, product = (
            _grouped(x[:, :, rows], block) for x in (query, grad, finite[..., None], products[..., None])
        )
        key, value = block.key[:, :, :seen], block.value[:, :, :seen]
        weights = (_scores(queries, block, rows, seen) - total).exp_()  # (batch, kv heads, group, rows, seen)
        to_value[:, :, :seen] += _over_queries(weights.to(grad.dtype), grads)
        to_scores = _times(grads, value.transpose(2, 3)).to(kind).sub_(product).mul_(weights).mul_(block.scale)
        to_scores = to_scores.to(query.dtype)
        to_query[:, :, rows] = _times(to_scores, key).flatten(1, 2).to(kind)
        to_key[:, :, :seen] += _over_queries(to_scores, queries)
    return to_query, to_key, to_value


def _tiles(query: Tensor, block: Block) -> Iterator[tuple[slice, int]]:
    """Rows of queries, and how many of the keys any of them sees."""
    batch, heads, length, _ = query.shape
    keys = block.key.shape[2]
    step = max(1, TILE // max(1, batch * heads * keys))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), min(stop, keys) if block.is_causal else keys


def _grouped(x: Tensor, block: Block) -> Tensor:
    """(batch, heads, rows, width) as (batch, kv heads, group, rows, width)."""
    grouped: Tensor = x.unflatten(1, (block.key.shape[1], -1))
    return grouped


def _scores(queries: Tensor, block: Block, rows: slice, seen: int) -> Tensor:
    kind = torch.promote_types(queries.dtype, torch.float32)
    scores = _times(queries, block.key[:, :, :seen].transpose(2, 3)).to(kind).mul_(block.scale)
    if block.is_causal:
        places = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        return scores.masked_fill_(torch.arange(seen, device=scores.device) > places, -torch.inf)
    if block.mask is None:
        return scores
    mask = block.mask[:, :, rows]  # (batch or 1, heads or 1, rows, keys)
    mask = _grouped(mask, block) if mask.shape[1] > 1 else mask[:, :, None]
    scores.masked_fill_(mask == 0, -torch.inf)
    return scores if mask.dtype == torch.bool else scores.masked_fill_(mask == EVENLY, 0.0)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """f[B K G R X] times f[B K X Y], which all of a group share."""
    product: Tensor = (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])
    return product


def _over_queries(left: Tensor, right: Tensor) -> Tensor:
    """f[B K G R X] and f[B K G R Y], summed over all queries: f[B K X Y]."""
    return left.flatten(2, 3).transpose(2, 3) @ right.flatten(2, 3)


def _finite(sums: Tensor) -> Tensor:
    """Log-sum-exp to subtract: 0 for a query that sees no key, whose scores are -inf."""
    return sums.masked_fill(sums == -torch.inf, 0.0)
