"""The layout of a tensor over tensor-parallel ranks: the elements that each rank stores.

`ShardSpec` is the single source of truth for sharding, gathering, clipping, saving and resharding: one dim of the
tensor is a row of sections, each of which is either split over the ranks or held whole by every rank. Sections exist
because fused projections (`[q | k | v]`, `[gate | up]`) must be split part by part, and because the key and value
parts of multi-query attention cannot be split at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.units import largest_part


def split_sizes(size: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive pieces of `size` elements.

    Every piece is `ceil(size / parts)` long until the elements run out: the first ranks get the ceil, one piece may be
    shorter, the pieces after it are empty (`split_sizes(5, 4) == [2, 2, 1, 0]`). Long uneven pieces are a multiple of 8, but for
    the last (`split_sizes(14336, 3) == [4784, 4784, 4768]`).

    Args:
        size: Number of elements, >= 0.
        parts: Number of pieces, >= 1.

    Returns:
        `parts` sizes that sum to `size`.
    """
    piece = largest_part(size, parts)
    return [max(0, min(piece, size - piece * part)) for part in range(parts)]


def split_units(size: int, parts: int, unit: int) -> list[int]:
    """Sizes of `parts` consecutive pieces of `size` elements that are not cut inside a unit.

    With units of several elements (heads) the pieces are as even as they can be, the first ones one unit longer; with
    single elements they are those of `split_sizes`.

    Args:
        size: Number of elements, a multiple of `unit`.
        parts: Number of pieces, >= 1.
        unit: Elements that belong together, >= 1; 0 for single elements that are to be shared out like units.

    Returns:
        `parts` sizes that sum to `size`.
    """
    if unit == 1:
        return split_sizes(size, parts)
    together = max(1, unit)
    each, more = divmod(size // together, parts)
    return [together * (each + (part < more)) for part in range(parts)]


@dataclass(frozen=True)
class Section:
    """A run of consecutive positions: split over the ranks, or held whole by each of them.

    Args:
        size: Number of positions in the full tensor.
        sharded: Whether the ranks split it.
        unit: Positions that stay together; divides `size`. A head, where the heads do not divide by the ranks; 0 for
            one entry per such head.
    """

    size: int
    sharded: bool
    unit: int = 1

    def split(self, tp_size: int) -> list[int]:
        """Positions each rank holds of a split section."""
        return split_units(self.size, tp_size, self.unit)


@dataclass(frozen=True)
class ShardSpec:
    """Layout of one tensor: along `dim` it is the concatenation of `sections`; all other dims are whole.

    Args:
        dim: Dim of the tensor that is cut, >= 0.
        sections: The sections in order; their sizes sum to the full size of `dim`.
    """

    dim: int
    sections: tuple[Section, ...]

    @classmethod
    def contiguous(cls, dim: int, size: int) -> ShardSpec:
        """The layout with a single split section of `size` positions along `dim`."""
        return cls(dim, (Section(size, True),))

    @property
    def full_size(self) -> int:
        """Extent of `dim` in the full tensor."""
        return sum(section.size for section in self.sections)

    @property
    def sharded_share(self) -> float:
        """Share of the tensor in split sections, 0 to 1."""
        return sum(section.size for section in self.sections if section.sharded) / max(1, self.full_size)

    def ranges(self, tp_size: int, tp_rank: int) -> list[tuple[int, int]]:
        """Per section, the (start, length) this rank holds in coordinates of the full tensor."""
        held, offset = [], 0
        for section in self.sections:
            start, length = 0, section.size
            if section.sharded:
                sizes = section.split(tp_size)
                start, length = sum(sizes[:tp_rank]), sizes[tp_rank]
            held.append((offset + start, length))
            offset += section.size
        return held

    def local_size(self, tp_size: int, tp_rank: int) -> int:
        """Extent of `dim` on this rank."""
        return sum(length for _, length in self.ranges(tp_size, tp_rank))

    def local_sections(self, tp_size: int, tp_rank: int) -> list[int]:
        """Length of each section on this rank."""
        return [length for _, length in self.ranges(tp_size, tp_rank)]

    def index(self, tp_size: int, tp_rank: int) -> Tensor:
        """Positions along `dim` this rank holds, in storage order (i64, on the CPU)."""
        return torch.cat([torch.arange(start, start + length) for start, length in self.ranges(tp_size, tp_rank)])

    def shard(self, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        """This rank's part of `full`; a contiguous tensor that owns its storage.

        Raises:
            PlanError: If `full` does not have `full_size` positions along `dim`.
        """
        if full.ndim <= self.dim or full.shape[self.dim] != self.full_size:
            raise PlanError(
                f"a tensor of shape {tuple(full.shape)} cannot be sharded: the layout expects {self.full_size} "
                f"positions along dim {self.dim}. Make the plan for the model it is applied to."
            )
        held = [(start, length) for start, length in self.ranges(tp_size, tp_rank) if length]
        if len(held) == 1:
            return full.narrow(self.dim, *held[0]).clone(memory_format=torch.contiguous_format)
        return full.index_select(self.dim, self.index(tp_size, tp_rank).to(full.device)).contiguous()

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks, in rank order; unsharded sections are taken from rank 0.

        Raises:
            PlanError: If a shard does not have the extent its rank holds.
        """
        tp_size = len(shards)
        for rank, shard in enumerate(shards):
            expected = self.local_size(tp_size, rank)
            if shard.shape[self.dim] != expected:
                raise PlanError(
                    f"the shard of tp rank {rank} has shape {tuple(shard.shape)}: the layout expects {expected} "
                    f"positions along dim {self.dim} of {tp_size} ranks. Pass one shard of each rank, in rank order."
                )
        shape = list(shards[0].shape)
        shape[self.dim] = self.full_size
        full = shards[0].new_empty(shape)
        for rank in reversed(range(tp_size)):
            full.index_copy_(self.dim, self.index(tp_size, rank).to(full.device), shards[rank].to(full.device))
        return full

    def counted(self, tp_size: int, tp_rank: int) -> list[tuple[int, int]]:
        """Pieces (start, length) in local coordinates along `dim` that this rank counts.

        Over all ranks every element of the full tensor is counted once: split sections where they are stored, whole
        sections on rank 0. Adjacent ranges are merged, empty ones left out.
        """
        counted: list[tuple[int, int]] = []
        offset = 0
        for section, length in zip(self.sections, self.local_sections(tp_size, tp_rank), strict=True):
            if length and (section.sharded or tp_rank == 0):
                if counted and sum(counted[-1]) == offset:
                    counted[-1] = (counted[-1][0], counted[-1][1] + length)
                else:
                    counted.append((offset, length))
            offset += length
        return counted

    def to_json(self) -> dict[str, Any]:
        """Plain data: `{"dim": 0, "sections": [[size, sharded, unit], ...]}`."""
        return {"dim": self.dim, "sections": [[part.size, part.sharded, part.unit] for part in self.sections]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardSpec:
        """The inverse of `to_json`."""
        sections = (Section(int(size), bool(sharded), int(unit)) for size, sharded, unit in data["sections"])
        return cls(int(data["dim"]), tuple(sections))
