"""Chooses how many tokens a loss without logits works on at a time. Pure, because memory is estimated with it."""

from __future__ import annotations

from typing import Final


LEAST_ROWS: Final = 256  # below this the head's weight is read too often for what is computed with it


def rows_of_tile(tokens: int, hidden: int, vocabulary: int) -> int:
    """Number of tokens whose logits are as large as the hidden states of all, at least `LEAST_ROWS`.

    Args:
        tokens: Tokens of a microbatch.
        hidden: Width of the hidden states.
        vocabulary: Entries of this rank's part of it.
    """
    return max(LEAST_ROWS, -(-tokens * hidden // max(vocabulary, 1)))


def is_tiled(tokens: int, hidden: int, vocabulary: int) -> bool:
    """Whether the loss of a microbatch is computed in tiles: one tile would take what the logits take, so they are made.

    Args:
        tokens: Tokens of the microbatch.
        hidden: Width of the hidden states.
        vocabulary: Entries of this rank's part of it.
    """
    return tokens > rows_of_tile(tokens, hidden, vocabulary)
