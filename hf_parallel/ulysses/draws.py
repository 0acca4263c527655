"""Random numbers of a forward pass on a part of the sequence: other ones on each rank, and the same state after it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_parallel.model.random_streams import generators_of, stream_seed


@contextmanager
def own_draws(model: nn.Module, part: int, *, trains: bool) -> Iterator[None]:
    """Inside, this rank draws numbers of its own; after it, all ranks that began alike have the same random state again.

    Without it the tokens of all parts would get the same dropout masks. A forward that draws nothing leaves the state as it was.

    Args:
        model: The model.
        part: Which part of the sequence this rank has.
        trains: Whether dropout may be on.
    """
    if not trains:
        yield
        return
    generators = generators_of(model)
    before = [generator.get_state() for generator in generators]
    digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in before), digest_size=8)
    seed = stream_seed(int.from_bytes(digest.digest(), "big"), part)
    for generator in generators:
        generator.manual_seed(seed)
    began = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state, start in zip(generators, before, began, strict=True):
            drew = not torch.equal(generator.get_state(), start)
            generator.set_state(state)
            if drew:
                torch.empty(1, device=generator.device).uniform_(generator=generator)
