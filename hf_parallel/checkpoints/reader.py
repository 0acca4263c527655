"""The safetensors format, read piece by piece: the one reader of weight files.

A file is 8 bytes (length of the header, little endian), the header in JSON (name -> dtype, shape, begin and end of its
bytes), and the bytes of all tensors without gaps. Reading goes through `pread` into memory that is already the result:
a mapped file would count every page that was looked at as this process's memory. A file is opened once and its header read
once, however many of its tensors are wanted: on a shared file system an open can take a tenth of a second.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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
LONGEST_HEADER = 100_000_000
SHORTEST_RUN = 4096  # bytes; shorter runs are read with what lies between them
LARGE = 2**17  # bytes; the C library's own default for what gets pages of its own
BLOCK = 16 * 2**20  # bytes read at once then
MOST_OPEN = 32  # files


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Args:
        path: The file.
        name: Its name there.
        dtype: Type of its elements.
        shape: Its shape.
        start: Offset of its first byte in the file.
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
    with Reader() as reader:
        return reader.tensors(path)


def _stored(path: Path, name: str, entry: Mapping[str, Any], base: int) -> Stored:
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise damaged(path, f"{name} has the shape and bytes {numbers}")
    stored = Stored(path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), base + begin)
    if end - begin != stored.nbytes:
        raise damaged(path, f"{name} of {stored.dtype} {stored.shape} has {end - begin} bytes, not {stored.nbytes}")
    return stored


def damaged(path: Path, why: str) -> CheckpointError:
    """The error of a file that is not what it should be."""
    return CheckpointError(
        f"{path}: {why}. The file cannot be read: it is truncated or damaged; copy or save it again."
    )


class Reader:
    """Reads tensors or slices of them, and counts. Keeps its files open: close it, or use it in a `with`.

    Attributes:
        num_bytes: Bytes of tensors read so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._headers: dict[Path, dict[str, Stored]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close its files; it can go on reading, and opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def tensors(self, path: Path) -> dict[str, Stored]:
        """The tensors of a file by name; the header is read once.

        Raises:
            CheckpointError: The file is missing, truncated or damaged; names it.
        """
        if path not in self._headers:
            self._headers[path] = self._header(path)
        return self._headers[path]

    def find(self, path: Path, name: str) -> Stored:
        """A tensor of a file.

        Raises:
            CheckpointError: For the reasons of `tensors`; or the file does not hold it.
        """
        found = self.tensors(path)
        if name not in found:
            raise CheckpointError(
                f"{path}: {name} cannot be read: the index says that it is in this file, and it is not. The folder is half "
                "written or mixed from two; copy or save it again."
            )
        return found[name]

    def read(self, stored: Stored, dim: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """A tensor on the CPU, or the concatenation of some ranges of it; it owns its memory.

        Args:
            stored: Tensor to read.
            dim: Dim to which the ranges apply.
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
            descriptor = self._descriptor(stored.path)
            self._fill(descriptor, stored, target, extent * inner, [(s * inner, n * inner) for s, n in pieces])
        except OSError as error:
            raise CheckpointError(f"{stored.path}: {stored.name} cannot be read: {error.strerror}.") from error
        return result

    def _descriptor(self, path: Path) -> int:
        """The open file; the one that was used longest ago makes room."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = open_regular(path)
        return self._open[path]

    def _header(self, path: Path) -> dict[str, Stored]:
        try:
            descriptor = self._descriptor(path)
            size = os.fstat(descriptor).st_size
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if size < 8 or not 0 < length <= min(size - 8, LONGEST_HEADER):
                raise damaged(path, f"its header claims {length} bytes and the file has {size}")
            header = json.loads(_exactly(descriptor, length, 8))
            found = {
                name: _stored(path, name, entry, 8 + length)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}. The folder is not complete.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, f"its header cannot be read ({error!r:.200})") from error
        for stored in found.values():
            if stored.start + stored.nbytes > size:
                raise damaged(
                    path, f"{stored.name} ends at byte {stored.start + stored.nbytes} and the file at {size}"
                )
        return found

    def _fill(
        self, descriptor: int, stored: Stored, target: torch.Tensor, stride: int, runs: Sequence[tuple[int, int]]
    ) -> None:
        """Fill rows u8[R n] with the (start, length) `runs` of each row of `stride` bytes of the file."""
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
                raise damaged(stored.path, f"it ends inside {stored.name}")
            self.num_bytes += count
            view, offset = view[count:], offset + count


def open_regular(path: Path) -> int:
    """A descriptor to read a file by; what is no file (a pipe, a device, a folder) is not waited for.

    Raises:
        OSError: It cannot be opened.
        CheckpointError: It is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} cannot be read: it is no regular file. It is damaged; copy or save it again.")
    return descriptor


def _exactly(descriptor: int, length: int, offset: int) -> bytes:
    found = b""
    while len(found) < length and (more := os.pread(descriptor, length - len(found), offset + len(found))):
        found += more
    return found


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
    """Runs (row, place in the result's row, place in the file's row, length) to read."""
    for row in range(rows):
        offset = 0
        for start, length in runs:
            yield row, offset, start, length
            offset += length
