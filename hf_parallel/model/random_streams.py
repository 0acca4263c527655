"""Random streams of the segments of a model, so that dropout does not depend on the cut of the model.

Segment 0 is the code before block 0 and block 0, segment j the code before block j and block j, segment L the tail.
Each has its own stream; whichever stage runs a segment draws the same numbers. The generator is set when the block
before has run or was skipped, not in a hook before the block: activation checkpointing may save the random state
before such hooks run, and would then replay other masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits all depend on all input bits.

    Source: splitmix64, Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def stream_seed(seed: int, segment: int) -> int:
    """Seed of one segment's stream, 0 .. 2**64 - 1: mix64(mix64(seed) + segment). The CPU generator uses its low half."""
    return _of_segment(mix64(seed & MASK), segment)


def _of_segment(mixed: int, segment: int) -> int:
    return mix64((mixed + segment) & MASK)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that draws on a device when code names none; a CUDA device without an index is the current one."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """The default random generators of the CPU and, for a module on a CUDA device, of that device."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return [torch.default_generator] + ([default_generator(device)] if device.type == "cuda" else [])


class Streams:
    """The random generators of a model, taken over for one call.

    Args:
        generators: see `generators_of`.
        seed: any integer; the same on all stages of a microbatch.
    """

    def __init__(self, generators: Sequence[torch.Generator], seed: int) -> None:
        self._mixed = mix64(seed & MASK)
        self._generators = generators
        self._before: list[Tensor] = [generator.get_state() for generator in self._generators]

    def enter(self, segment: int) -> None:
        """Start the stream of a segment from its beginning."""
        seed = _of_segment(self._mixed, segment)
        for generator in self._generators:
            generator.manual_seed(seed)

    def close(self) -> None:
        """Put back the random state from before the call."""
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)


class StepSeeds:
    """Gives every microbatch of every step a seed of its own.

    Args:
        stages: The stages of this rank, by index; they have an attribute `seed`.
        base: Seed of the run; the same on all ranks of a model copy.

    Attributes:
        step: Training steps begun; part of a checkpoint, so that a resumed run draws what an unbroken one would.
    """

    def __init__(self, stages: Mapping[int, Any], base: int) -> None:
        self._stages, self._base = dict(stages), mix64(base & MASK)
        self.step = 0

    def next_step(self) -> None:
        """Begin a training step: all its masks are new."""
        self.step += 1

    def set(self, stage: int, microbatch: int) -> None:
        """Seed a stage for its next call: mix64(mix64(base) + step), then + microbatch, mixed again."""
        self._stages[stage].seed = mix64((mix64((self._base + self.step) & MASK) + microbatch) & MASK)
