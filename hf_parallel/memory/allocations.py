"""The memory of a device over time: every block that is taken and given back, and what was there when most was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


ROUND = 512  # bytes: CUDA's caching allocator gives multiples


@dataclass(slots=True, eq=False)
class Block:
    """One piece of memory.

    Attributes:
        kind: Kind of memory; may be said later.
        shape: Shape of the tensor that it was taken for.
        dtype: Dtype of that tensor.
        op: Operation that took it.
        where: Module and line that took it.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op: str = ""
    where: str = ""


@dataclass(frozen=True)
class Peak:
    """The memory in use when most was.

    Attributes:
        total_bytes: Bytes of all blocks.
        by_kind: Bytes by kind, the largest first.
        largest: (bytes, blocks, kind, shape, dtype, op, where) of blocks that are alike, the largest first.
    """

    total_bytes: int
    by_kind: Mapping[str, int]
    largest: tuple[tuple[int, int, str, tuple[int, ...], str, str, str], ...]


class Allocations:
    """Blocks as they come and go.

    Args:
        multiple: Multiple to which numbers of bytes are rounded up.

    Attributes:
        now_bytes: Bytes taken at present.
    """

    def __init__(self, multiple: int = ROUND) -> None:
        self.now_bytes = 0
        self._multiple = multiple
        self._sizes: dict[Block, int] = {}
        self._begun: dict[Block, int] = {}
        self._events: list[tuple[Block, int]] = []

    def resize(self, block: Block, size: int) -> None:
        """Let a block have `size` bytes from now on; 0: it is given back."""
        size = -(-size // self._multiple) * self._multiple
        before = self._sizes.get(block, 0)
        if size == before:
            return
        if size:
            self._sizes[block] = size
        else:
            del self._sizes[block]
        self.now_bytes += size - before
        self._events.append((block, size - before))

    def begin(self) -> None:
        """Forget what was; what is there now stays."""
        self._begun, self._events = dict(self._sizes), []

    @property
    def changes(self) -> Sequence[tuple[Block, int]]:
        """Blocks and the bytes by which they grew or shrank since `begin`, in order."""
        return self._events

    def peak(self, most: int = 12) -> Peak:
        """The moment since `begin` at which most memory was taken.

        Args:
            most: Groups of equal blocks to tell.
        """
        best = here = sum(self._begun.values())
        place = 0
        for index, (_, change) in enumerate(self._events, 1):
            here += change
            if here > best:
                best, place = here, index
        there = dict(self._begun)
        for block, change in self._events[:place]:
            there[block] = there.get(block, 0) + change
        return Peak(best, _by_kind(there), tuple(_alike(there))[:most])


def _by_kind(blocks: Mapping[Block, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for block, size in blocks.items():
        found[block.kind] = found.get(block.kind, 0) + size
    return {kind: size for kind, size in sorted(found.items(), key=lambda item: -item[1]) if size}


def _alike(blocks: Mapping[Block, int]) -> Iterator[tuple[Any, ...]]:
    found: dict[tuple[Any, ...], list[int]] = {}
    for block, size in blocks.items():
        if size:
            found.setdefault((block.kind, block.shape, block.dtype, block.op, block.where), []).append(size)
    for about, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        yield (sum(sizes), len(sizes), *about)
