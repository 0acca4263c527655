"""Random numbers of blocks that run on parts of a sequence.

Ranks draw equal numbers where they compute the same and must stay in step there, whatever the size of their part. Where
each has a part of the sequence they must draw different ones: they are different tokens. So a block's part draws from a
stream of its own, seeded from the common one and the rank; the common stream goes on in regions and after the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_parallel.tensor_parallel.functions import TPGroup


class Draws:
    """The common stream and that of the part, one of which is the process's at a time.

    Args:
        group: The tensor-parallel group.
    """

    def __init__(self, group: TPGroup) -> None:
        self.group = group
        self._other: Tensor | None = None
        self._in_region = False

    @contextlib.contextmanager
    def of_block(self, length: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def of_region(self) -> Iterator[None]:
        yield

    def leave_region(self) -> None:
        pass
