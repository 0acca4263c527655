"""The safetensors format, written piece by piece; how it is read is in `checkpointing.stored`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_parallel.checkpoints.reader import BLOCK, DTYPES, Reader, Stored, read_header
from hf_parallel.errors import CheckpointError


__all__ = ["DTYPES", "Reader", "Stored", "lay_out", "read_header", "write"]

NAMES = {dtype: name for name, dtype in DTYPES.items()}
RANK_OF = {name: rank for rank, name in enumerate(DTYPES)}


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
