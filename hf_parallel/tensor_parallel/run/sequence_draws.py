"""Random numbers of blocks that run on parts of a sequence.

Ranks draw equal numbers where they compute the same, and must stay in step there whatever the size of their part. Where
each has a part of the sequence they must draw different ones, because those are different tokens. So the part of a block draws
from a stream of its own, seeded from the state of the common one and the rank; regions, and code after the block, use the
common stream. A block that is recomputed from the same state draws the same again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_parallel.model.random_streams import default_generator
from hf_parallel.tensor_parallel.run.functions import TPGroup, VirtualGroup
from hf_parallel.tensor_parallel.run.shard_seeds import PairSeeds


class Draws:
    """Switches the process between two random streams.

    Does nothing in evaluation and on virtual ranks, which share one.

    Args:
        group: The tensor-parallel group.

    Attributes:
        pairs: Saves the random state while a pair runs; the streams are exchanged in what it saved.
    """

    def __init__(self, group: TPGroup) -> None:
        self._group = group
        self.pairs: PairSeeds | None = None
        self._generator: torch.Generator | None = None
        self._others: Tensor | None = None  # state of the stream that is not in use
        self._in_region = False

    @contextlib.contextmanager
    def of_block(self, device: torch.device, *, trains: bool) -> Iterator[None]:
        """Inside, a block on `device` draws for its part of the sequence."""
        if not trains or isinstance(self._group, VirtualGroup):
            yield
            return
        generator = default_generator(device)
        state = generator.get_state()
        torch.empty(1, device=generator.device).uniform_(
            generator=generator
        )  # the next block begins from another state
        self._generator, self._others = generator, generator.get_state()
        salt = self._group.rank().to_bytes(4, "little")
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7, salt=salt).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        try:
            yield
        finally:
            self.leave_block()

    @contextlib.contextmanager
    def of_region(self) -> Iterator[None]:
        """Inside, draw what all ranks draw."""
        self._swap(True)
        try:
            yield
        finally:
            self._swap(False)

    def leave_region(self) -> None:
        """Let the rest of a region work on a part."""
        self._swap(False)

    def leave_block(self) -> None:
        """Draw what all ranks draw again."""
        self._swap(True)
        self._generator = self._others = None
        self._in_region = False

    def _swap(self, in_region: bool) -> None:
        if self._generator is None or self._others is None or self._in_region == in_region:
            return
        state = None if self.pairs is None else self.pairs.exchange(self._generator, self._others)
        if state is None:
            state = self._generator.get_state()
            self._generator.set_state(self._others)
        self._others, self._in_region = state, in_region
