"""Describes a rank's part of a tensor as boxes of the whole tensor: the form in which all layouts save and read.

Whatever the layout, memory on a rank is a run of consecutive elements of its tensor-parallel shard: all of it, its rows
of it (FSDP2), or any run of it (a flat ZeRO part). A run is a few boxes of the shard (at most 2 x dims - 1), and a box
of the shard is one box of the whole tensor for each section it touches. So nothing is gathered, and a box says in
plain numbers where its elements belong, which any other layout can read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_parallel.ledger import Entry
from hf_parallel.mesh.groups import Mesh
from hf_parallel.tensor_parallel.layout import ShardSpec


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the checkpoint.

    Args:
        label: Name of the tensor in the checkpoint.
        shape: Shape of the whole tensor.
        offsets: Offset of the box in the whole tensor, one number a dim.
        data: Its elements, of the box's shape; a view, so that reading into it fills what it was made of.
    """

    label: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class Box:
    """Consecutive elements of a tensor that form a box of it.

    Args:
        offsets: Offset of the box, one number a dim.
        sizes: Its extent.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [start, stop) of a contiguous tensor form, in their order.

    At most three for a matrix: the end of a row, whole rows, the beginning of a row. Elements 2 to 10 of a 4 x 3 matrix are
    [0, 2:3], [1:3, :] and [3, 0:1].

    Args:
        shape: Shape of the tensor.
        start: First element, in the order of storage.
        stop: The one after the last.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _inside_row(shape, start // row, start, stop)
        return
    if start < first * row:
        yield from _inside_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _inside_row(shape, last, last * row, stop)


def _inside_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in boxes_of_run(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes))


def pieces_of(
    label: str, entry: Entry, mesh: Mesh, run: Tensor, start: int = 0, *, counted_only: bool = False
) -> Iterator[Piece]:
    """The pieces of the whole tensor that a run of this rank's shard is.

    Args:
        label: Name in the checkpoint.
        entry: The parameter it belongs to, and has the shape of.
        mesh: This rank's mesh.
        run: The elements f[n]; reading a piece writes into it.
        start: Position of the first element in the shard.
        counted_only: Leave out what another tensor-parallel rank writes.
    """
    flat, taken = run.view(-1), 0
    for box in boxes_of_run(local_shape(entry, mesh), start, start + flat.numel()):
        data = flat[taken : taken + box.numel].view(box.sizes)
        taken += box.numel
        for offsets, part, counted in _in_whole(box, data, entry.spec, mesh):
            if counted or not counted_only:
                yield Piece(label, entry.shape, offsets, part)


def local_shape(entry: Entry, mesh: Mesh) -> tuple[int, ...]:
    """Shape of this rank's tensor-parallel shard."""
    shape = list(entry.shape)
    if entry.spec is not None:
        shape[entry.spec.dim] = entry.spec.local_size(mesh.parts.size, mesh.parts.rank)
    return tuple(shape)


def _in_whole(
    box: Box, data: Tensor, spec: ShardSpec | None, mesh: Mesh
) -> Iterator[tuple[tuple[int, ...], Tensor, bool]]:
    """Boxes (offsets in the whole tensor, elements, whether this tp rank writes them) of a box of the shard."""
    first_rank = mesh.tp_rank == 0
    if spec is None:
        yield box.offsets, data, first_rank
        return
    low, size, here = box.offsets[spec.dim], box.sizes[spec.dim], 0
    for section, (begin, length) in zip(spec.sections, spec.ranges(mesh.parts.size, mesh.parts.rank), strict=True):
        at, end = max(low, here), min(low + size, here + length)
        if at < end:
            offsets = (*box.offsets[: spec.dim], begin + at - here, *box.offsets[spec.dim + 1 :])
            yield offsets, data.narrow(spec.dim, at - low, end - at), section.sharded or first_rank
        here += length


def is_writer(label: str, copy: int, copies: int) -> bool:
    """Whether one of several ranks with the same elements writes them; the labels are distributed over the copies."""
    return zlib.crc32(label.encode()) % copies == copy
