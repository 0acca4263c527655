"""Pieces to and from `torch.distributed.checkpoint`: every rank writes its own, and reads what it holds now.

DCP wants a process group only to save, to put one index together; without one it saves a single process. Reading is
local to each rank: the index says where every box of every tensor lies. The planners are ours because tensor-parallel
shards are plain tensors with several ranges of the whole one, which DCP's own planners have no type for.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from hf_parallel.checkpoints.manifest import is_bare, is_regular
from hf_parallel.checkpoints.reader import open_regular
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.errors import CheckpointError


INDEX = ".metadata"


def save_pieces(folder: Path, pieces: Iterable[Piece], group: dist.ProcessGroup | None = None) -> None:
    """Write pieces that no other rank writes; all ranks of the group call it.

    Args:
        folder: Folder to write to; made if it is not there.
        pieces: This rank's; over all ranks they make up whole tensors.
        group: None for all ranks.

    Raises:
        CheckpointError: A rank could not write, or pieces leave gaps or overlap; the same text on all ranks.
    """
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save(
                {},
                storage_writer=FileSystemWriter(folder),
                planner=_SavePieces(pieces),
                process_group=group,
                no_dist=alone,
            )
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        raise CheckpointError(f"{folder}: rank {rank}: {type(error).__name__}: {error}") from error


class TensorIndex:
    """The index of a folder that `save_pieces` wrote.

    Args:
        folder: The folder.

    Attributes:
        tensors: Label -> shape and dtype.

    Raises:
        CheckpointError: There is no index, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _SafeReader(folder)
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            label: (tuple(found.size), found.properties.dtype)
            for label, found in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def holders(self) -> Mapping[str, list[tuple[int, str]]]:
        """File name -> (first byte after it, label) of every piece in it, in order."""
        found: dict[str, list[tuple[int, str]]] = {}
        for index, place in self._reader.read_metadata().storage_data.items():
            found.setdefault(place.relative_path, []).append((place.offset + place.length, index.fqn))
        return {file: sorted(pieces) for file, pieces in found.items()}

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill pieces from the files.

        Raises:
            CheckpointError: A tensor is missing, of another shape, has gaps, or its file is damaged.
        """
        for piece in pieces:
            if piece.label not in self.tensors:
                raise CheckpointError(
                    f"{self.folder / INDEX} has no tensor {piece.label}. The checkpoint is of another model: build the model with its "
                    "config, or name another checkpoint."
                )
            shape = self.tensors[piece.label][0]
            if shape != piece.shape:
                raise CheckpointError(
                    f"{self.folder / INDEX}: {piece.label} has shape {shape}, the model needs {piece.shape}. The "
                    "checkpoint is of another model: build the model with its config, or name another checkpoint."
                )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                planner = _LoadPieces(pieces, self.folder)
                state_dict_loader.load({}, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as failed:
            _, (error, _) = min(failed.failures.items())
            if isinstance(error, CheckpointError):
                raise error from None
            raise CheckpointError(f"{self.folder} cannot be read: {type(error).__name__}: {error}") from error


class _SavePieces(SavePlanner):
    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece.data.numel() or not piece.shape]
        self._data = {(piece.label, piece.offsets): piece.data for piece in self._pieces}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for label, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                _refuse_gaps(label, tensor)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._data[write_item.index.fqn, tuple(write_item.index.offset or ())].detach()


def _write_item(piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.offsets), piece.data.shape
    return WriteItem(
        index=MetadataIndex(piece.label, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=piece.data.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def _refuse_gaps(label: str, tensor: TensorStorageMetadata) -> None:
    covered = sum(chunk.sizes.numel() for chunk in tensor.chunks)
    if covered != tensor.size.numel():
        raise CheckpointError(
            f"{label} of shape {tuple(tensor.size)}: the ranks would write {covered} of {tensor.size.numel()} elements."
        )


class _LoadPieces(LoadPlanner):
    def __init__(self, pieces: Sequence[Piece], folder: Path) -> None:
        self._folder = folder
        self._by_label: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.data.numel():
                self._by_label.setdefault(piece.label, []).append(piece)
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata or self._metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for label, pieces in self._by_label.items():
            stored = self._metadata.state_dict_metadata[label]
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{self._folder / INDEX}: {label} is not a tensor.")
            chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.shape) for piece in pieces]
            found = create_read_items_for_chunk_list(label, stored, chunks)
            missing = sum(piece.data.numel() for piece in pieces) - sum(item.lengths.numel() for item in found)
            if missing:
                raise CheckpointError(
                    f"{self._folder / INDEX}: {missing} elements of {label} are in no file: the index is damaged."
                )
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{self._folder}: {read_item.dest_index.fqn} is not a tensor.")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        target = self._by_label[index.fqn][index.index or 0].data
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target.detach()

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor was filled in place."""


class _SafeReader(FileSystemReader):
    """Reads the index without running what a pickle may say: only names of DCP's own data are looked up."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index = folder / INDEX
        self._known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is None:
            try:
                with open(open_regular(self._index), "rb") as file:
                    found = _IndexUnpickler(file).load()
            except Exception as error:  # a damaged pickle raises nearly anything
                raise CheckpointError(
                    f"{self._index} cannot be read: {type(error).__name__}: {error}. It is missing, truncated or damaged."
                ) from error
            if not isinstance(found, Metadata) or found.storage_data is None:
                raise CheckpointError(f"{self._index} is not an index of tensors: it was not written by hf_parallel.")
            self._refuse_elsewhere(found)
            self._known = found
        return self._known

    def _refuse_elsewhere(self, found: Metadata) -> None:
        """Refuse an index whose tensors are not in the folder, or cannot be: nothing is read or made for them."""
        folder, sizes = self._index.parent, dict[str, int]()
        for place in found.storage_data.values():
            name = place.relative_path
            if is_bare(name) and not os.path.lexists(folder / name):
                sizes[name] = 1 << 62  # reading says which tensors are lost
                continue
            if not is_bare(name) or not is_regular(folder / name):
                raise CheckpointError(
                    f"{self._index} says that tensors are in {str(name)!r:.200}, which is no file beside it. It is damaged, or "
                    "was not written by a save; resume from another checkpoint."
                )
            sizes[name] = (folder / name).stat().st_size
        room = sum(sizes.values())
        for label, tensor in found.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                needed = tensor.size.numel() * tensor.properties.dtype.itemsize
                if not 0 <= needed <= room or any(size < 0 for size in tensor.size):
                    raise CheckpointError(
                        f"{self._index} says that {label} has the shape {tuple(tensor.size)}, and its files have {room} bytes. "
                        "It is damaged; resume from another checkpoint."
                    )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """One piece after the other, so that a file that is damaged is named with the tensor that is lost."""
        for item in plan.items:
            try:
                super().read_data(LoadPlan([item]), planner)
            except Exception as error:
                file = self._index.parent / self.storage_data[item.storage_index].relative_path
                raise CheckpointError(
                    f"{file}: {item.dest_index.fqn} cannot be read: {type(error).__name__}: {error} The file is truncated "
                    "or damaged."
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _member(kind: Any, name: str) -> Any:
    """A member of an enum: Python 3.11.2 and older pickle it as an attribute of its class."""
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{getattr(kind, '__qualname__', kind)}.{name} has no place in an index of tensors")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index of tensors")


_HARMLESS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath"),
}
