"""The safetensors format, read and written piece by piece.

A file is 8 bytes (length of the header, little endian), the header in JSON (name -> dtype, shape, begin and end of its
bytes), and the bytes of all tensors without gaps. Reading goes through `pread` into memory that is already the result:
a mapped file would count every page that was looked at as this process's memory.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_parallel.errors import CheckpointError


# In the order in which safetensors lays them out, the last first: wide elements come first, so that all are aligned.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RANK_OF = {name: rank for rank, name in enumerate(DTYPES)}
LONGEST_HEADER = 100_000_000
SHORTEST_RUN = 4096  # bytes; shorter runs are read with what lies between them
LARGE = 2**17  # bytes; the C library's own default for what gets pages of its own
BLOCK = 16 * 2**20  # bytes read at once then


@dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Args:
        path: The file.
        name: Its name there.
        dtype: Type of its elements.
        shape: Its shape.
        start: Where its bytes begin in the file.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: The file is missing, truncated or damaged; names it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, LONGEST_HEADER):
                raise _damaged(path, f"its header claims {length} bytes and the file has {size}")
            header = json.loads(file.read(length))
        found = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items() if name[:2] != "__"}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}. The folder is not complete.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read ({error!r})") from error
    for stored in found.values():
        if stored.start + stored.nbytes > size:
            raise _damaged(path, f"{stored.name} ends at byte {stored.start + stored.nbytes} and the file at {size}")
    return found


def _stored(path: Path, name: str, entry: Mapping[str, Any], base: int) -> Stored:
    begin, end = entry["data_offsets"]
    stored = Stored(path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), base + begin)
    if end - begin != stored.nbytes:
        raise _damaged(path, f"{name} of {stored.dtype} {stored.shape} has {end - begin} bytes, not {stored.nbytes}")
    return stored


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: {why}. It is truncated or damaged; copy or save it again.")


class Reader:
    """Reads tensors or slices of them, and counts.

    Attributes:
        num_bytes: Bytes read so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, stored: Stored, dim: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """A tensor on the CPU, or the concatenation of some ranges of it; it owns its memory.

        Args:
            stored: Which one.
            dim: Dim that the ranges are of.
            ranges: (start, length) in order; None for all of it.

        Raises:
            CheckpointError: The file ends early or cannot be read; names it and the tensor.
        """
        shape = list(stored.shape)
        inner = math.prod(shape[dim + 1 :]) * stored.dtype.itemsize
        extent = shape[dim] if shape else 1
        pieces = [(s, n) for s, n in ranges if n] if ranges is not None else [(0, extent)]
        if shape:
            shape[dim] = sum(n for _, n in pieces)
        result = _room(shape, stored.dtype)
        if not result.numel():
            return result
        rows = math.prod(shape[:dim])
        target = result.view(-1).view(torch.uint8).view(rows, -1)
        try:
            descriptor = os.open(stored.path, os.O_RDONLY)
            try:
                self._fill(descriptor, stored, target, extent * inner, [(s * inner, n * inner) for s, n in pieces])
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{stored.path}: {stored.name} cannot be read: {error.strerror}.") from error
        return result

    def _fill(
        self, descriptor: int, stored: Stored, target: torch.Tensor, stride: int, runs: Sequence[tuple[int, int]]
    ) -> None:
        """Rows u8[R n]: of each row of `stride` bytes of the file, the (start, length) `runs`."""
        whole = sum(length for _, length in runs)
        if whole == stride:
            self._read(descriptor, stored, stored.start, target.view(-1))
        elif min(length for _, length in runs) >= SHORTEST_RUN or len(target) == 1:
            for row, offset, start, length in _runs(len(target), runs):
                into = target[row, offset : offset + length]
                self._read(descriptor, stored, stored.start + row * stride + start, into)
        else:
            step = max(1, BLOCK // stride)
            for row in range(0, len(target), step):
                rows = min(step, len(target) - row)
                block = torch.empty(rows, stride, dtype=torch.uint8)
                self._read(descriptor, stored, stored.start + row * stride, block.view(-1))
                parts = [block.narrow(1, start, length) for start, length in runs]
                torch.cat(parts, 1, out=target[row : row + rows])

    def _read(self, descriptor: int, stored: Stored, offset: int, into: torch.Tensor) -> None:
        view = memoryview(into.numpy())  # type: ignore[arg-type]  # the stubs of Python 3.11 know no buffers
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise _damaged(stored.path, f"it ends inside {stored.name}")
            self.num_bytes += count
            view, offset = view[count:], offset + count


def _room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to read into; a large one in pages of its own.

    The C library keeps what is freed between blocks of a few MB: measured, loading took 1.4 times the memory of the weights.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _runs(rows: int, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(row, place in the result's row, place in the file's row, length)."""
    for row in range(rows):
        offset = 0
        for start, length in runs:
            yield row, offset, start, length
            offset += length


def lay_out(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, Stored]:
    """Make a file with its header and room for its tensors; the same bytes as `safetensors.torch.save_file` writes.

    Args:
        path: The file to be made.
        tensors: Shapes and dtypes by name; values are not read, they may be on `meta`.
        metadata: Goes into the header.

    Returns:
        Where each tensor belongs.
    """
    order = sorted(tensors, key=lambda name: (-RANK_OF[NAMES[tensors[name].dtype]], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    starts = {}
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(base + offset)
    return {
        name: Stored(path, name, tensors[name].dtype, tuple(tensors[name].shape), base + starts[name])
        for name in order
    }


def write(stored: Stored, tensor: torch.Tensor) -> None:
    """Put a tensor's bytes where they belong.

    Raises:
        CheckpointError: The tensor is of another type or shape than was laid out, or the disk is full.
    """
    if tensor.dtype != stored.dtype or tuple(tensor.shape) != stored.shape:
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {tensor.dtype} {tuple(tensor.shape)}, not {stored.dtype} {stored.shape}."
        )
    if not tensor.numel():
        return
    view = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    offset = stored.start
    try:
        descriptor = os.open(stored.path, os.O_WRONLY)
        try:
            while view:
                count = os.pwrite(descriptor, view[:BLOCK], offset)
                view, offset = view[count:], offset + count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {stored.name} cannot be written: {error.strerror}.") from error
