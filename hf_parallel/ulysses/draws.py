"""Random numbers of a forward pass on a part of the sequence: other ones on each rank, and the same state after it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_parallel.model.random_streams import generators_of, stream_seed


class Draws:
    """The random generators of one forward.

    Args:
        generators: Generators that draw numbers of this rank's own; none if all ranks draw alike anyway.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self.common: list[Tensor] = _states(generators)  # what ranks that began alike share

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Inside, all ranks draw the same numbers, which are those of one process if nothing else is drawn."""
        own = _states(self._generators)
        self.put(self.common)
        try:
            yield
        finally:
            self.common = _states(self._generators)
            self.put(own)

    def put(self, states: Sequence[Tensor]) -> None:
        """Go on from these states."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def own_draws(model: nn.Module, part: int, *, trains: bool) -> Iterator[Draws]:
    """Inside, this rank draws numbers of its own; after it, all ranks that began alike have the same random state again.

    Without it the tokens of all parts would get the same dropout masks. A forward that draws nothing leaves the state as it was.

    Args:
        model: The model.
        part: Index of the part of the sequence that this rank has.
        trains: Whether dropout may be on.
    """
    if not trains:
        yield Draws(())
        return
    generators = generators_of(model)
    draws = Draws(generators)
    digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in draws.common), digest_size=8)
    seed = stream_seed(int.from_bytes(digest.digest(), "big"), part)
    for generator in generators:
        generator.manual_seed(seed)
    began = _states(generators)
    try:
        yield draws
    finally:
        drew = [
            not torch.equal(generator.get_state(), start) for generator, start in zip(generators, began, strict=True)
        ]
        draws.put(draws.common)
        for generator, more in zip(generators, drew, strict=True):
            if more:
                torch.empty(1, device=generator.device).uniform_(generator=generator)


def _states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]
