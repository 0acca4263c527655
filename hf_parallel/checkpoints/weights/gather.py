"""Weights of a parallelized model to and from files, by the ledger.

They are written as one normal Hugging Face checkpoint: the writer receives every tensor whole, in ledger order. Each rank
reads back only what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.checkpoints.manifest import is_bare, read_json, read_manifest
from hf_parallel.checkpoints.reader import Reader
from hf_parallel.data_parallel.fsdp_parts import local_of, rows_of, whole_of
from hf_parallel.errors import CheckpointError
from hf_parallel.guards.gradients.shown import plain_of
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh.groups import Mesh


WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
COPY_AGAIN = "Save or copy the folder again, or resume from another checkpoint."  # ends messages about a folder that lacks files


def gather_tensors(
    ledger: Ledger, held: Mapping[str, torch.Tensor], mesh: Mesh, *, wanted: Callable[[Entry], bool] | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor of the full model, whole and on the CPU, on world rank 0; {} elsewhere. Collective.

    Args:
        ledger: The model's ledger.
        held: Ledger name -> this rank's tensor or shard.
        mesh: This rank's mesh.
        wanted: Entries to gather; all by default.
    """
    full: dict[str, torch.Tensor] = {}
    group = mesh.host_group  # made on every rank, also on those that send nothing
    for entry in ledger:
        if wanted is None or wanted(entry):
            mine = held.get(entry.name)
            mine = mine if mine is None else whole_of(plain_of(mine))  # over the replicas, one tensor at a time
            tensor = _gather_one(entry, mine, mesh, group) if mesh.copy_rank < mesh.shape.ep_size else None
            if tensor is not None:
                full[entry.name] = tensor
    return full


def _on_cpu(entry: Entry, mine: torch.Tensor | None, mesh: Mesh) -> torch.Tensor:
    if mine is None:
        raise CheckpointError(
            f"{entry.name} was planned for {mesh.describe()}, but is no longer in the model. Change a model before it is prepared, not "
            "meanwhile."
        )
    return mine.detach().to("cpu", entry.dtype)


def _gather_one(
    entry: Entry, mine: torch.Tensor | None, mesh: Mesh, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """The whole tensor on world rank 0, None elsewhere; those that hold the owner stage's shards send them."""
    size = mesh.shape.parts_size if entry.spec is not None else 1
    sources = [mesh.shape.holder(entry.owner, part) for part in range(size)]
    if mesh.rank in sources and mesh.rank != 0:
        dist.send(_on_cpu(entry, mine, mesh).contiguous(), dst=0, group=group)
    if mesh.rank != 0:
        return None
    shards = []
    for part, source in enumerate(sources):
        if source == 0:
            shards.append(_on_cpu(entry, mine, mesh))
            continue
        shape = list(entry.shape)
        if entry.spec is not None:
            shape[entry.spec.dim] = entry.spec.local_size(size, part)
        buffer = torch.empty(shape, dtype=entry.dtype)
        dist.recv(buffer, src=source, group=group)
        shards.append(buffer)
    whole = shards[0] if entry.spec is None else entry.spec.assemble(shards)
    return whole.clone() if whole.data_ptr() == (mine.data_ptr() if mine is not None else 0) else whole


@torch.no_grad()
def load_weights(
    folder: str | Path,
    ledger: Ledger,
    held: Mapping[str, torch.Tensor],
    mesh: Mesh,
    *,
    converted: Callable[[str], torch.Tensor | None] | None = None,
) -> None:
    """Copy this rank's tensors out of a Hugging Face checkpoint, reading only its own slices.

    Args:
        folder: The checkpoint.
        ledger: The model's ledger.
        held: Ledger name -> this rank's tensor or shard, to be overwritten.
        mesh: This rank's mesh.
        converted: Makes a whole tensor of what the checkpoint has under other names (the experts of many types), by name.

    Raises:
        CheckpointError: No weights in the folder, an unreadable file, or a tensor that is missing or of another shape.
    """
    with Reader() as reader:
        files = weight_files(Path(folder), reader)
        for name, tensor in held.items():
            entry = ledger.entries[name]
            alias = next((alias for alias in entry.state_names if alias in files), None)
            if alias is not None:
                part = _read(reader, files[alias], alias, entry, mesh)
            else:
                made = (converted(alias) for alias in entry.state_names) if converted is not None else iter(())
                whole = next((whole for whole in made if whole is not None), None)
                part = _part_of(whole, folder, entry, mesh, len(files))
            local_of(tensor).copy_(rows_of(tensor, part))


def _part_of(whole: torch.Tensor | None, folder: str | Path, entry: Entry, mesh: Mesh, count: int) -> torch.Tensor:
    """Cut this rank's part out of a converted tensor."""
    if whole is None:
        raise CheckpointError(
            f"{folder}: no tensor named {' or '.join(entry.state_names)} among {count}. The checkpoint is of another model: "
            "build the model with its config, or name another checkpoint."
        )
    if tuple(whole.shape) != entry.shape:
        raise CheckpointError(f"{folder}: {entry.name} has shape {tuple(whole.shape)}, the model needs {entry.shape}.")
    return whole if entry.spec is None else entry.spec.shard(whole, mesh.parts.size, mesh.parts.rank)


def check_config(folder: Path, config: Any) -> None:
    """Refuse the checkpoint of a model of another type or size, before any tensor is looked at.

    Raises:
        CheckpointError: Names the file, the setting, and both values.
    """
    if not (folder / CONFIG).is_file():
        return
    saved, here = _config_of(folder), config.to_dict()
    sizes = {key for key, value in here.items() if type(value) is int and not key.startswith(("max_", "pad_"))}
    compared = ["model_type", *sorted(key for key in sizes if not key.endswith("_token_id"))]
    for key in compared:
        if key in saved and saved[key] != here.get(key):
            raise CheckpointError(
                f"{folder / CONFIG}: {key}={saved[key]}, but this run's model has {here.get(key)}. The checkpoint is of "
                "another model: build the model with the checkpoint's config, or resume from another checkpoint."
            )


def _config_of(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG)


def tensor_names(folder: Path) -> list[str]:
    """Names of the weights in a folder; none if they are not in the files of a whole model."""
    has_weights = (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()
    return list(weight_files(folder)) if has_weights else []


def weight_files(folder: Path, reader: Reader | None = None) -> dict[str, Path]:
    """Tensor name -> the safetensors file that has it.

    A folder with a manifest has the weights that it lists. Where there are several files and a single one, the single one
    counts, as for transformers.

    Args:
        folder: The folder.
        reader: Reader that reads its files afterwards; one of its own by default.

    Raises:
        CheckpointError: The folder has neither weights nor an index, or a file of the index is missing or elsewhere.
    """
    listed = read_manifest(folder)
    single, index = (
        path if path.is_file() and (listed is None or path.name in listed) else None
        for path in (folder / WEIGHTS, folder / WEIGHTS_INDEX)
    )
    if single is not None:
        with Reader() as own:
            return dict.fromkeys((reader or own).tensors(single), single)
    if index is None:
        raise CheckpointError(
            f"{folder} has no {WEIGHTS} and no {WEIGHTS_INDEX}: it is not a complete checkpoint. {COPY_AGAIN}"
        )
    return _indexed(index, listed)


def _indexed(index: Path, listed: Mapping[str, object] | None) -> dict[str, Path]:
    """Read an index: tensor name -> file beside the index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} cannot be read: weight_map={names!r:.60}. It is truncated or damaged.")
    files = set(map(str, names.values()))
    odd = [file for file in names.values() if not is_bare(file) or not file.endswith(".safetensors")]
    if odd:
        raise CheckpointError(
            f"{index} says that tensors are in {odd[0]!r:.200}, which is not the name of a safetensors file beside it. It is "
            "damaged, or was not written by a save; copy or save the folder again."
        )
    missing = sorted(str(index.parent / file) for file in files if not (index.parent / file).is_file())
    if missing:
        raise CheckpointError(f"{index} names files that do not exist: {', '.join(missing)}. {COPY_AGAIN}")
    unlisted = sorted(files - listed.keys()) if listed is not None else []
    if unlisted:
        raise CheckpointError(f"{index} names {', '.join(unlisted)}, which the manifest does not list. {COPY_AGAIN}")
    return {name: index.parent / file for name, file in names.items()}


def _read(reader: Reader, path: Path, name: str, entry: Entry, mesh: Mesh) -> torch.Tensor:
    stored = reader.find(path, name)
    if stored.shape != entry.shape:
        raise CheckpointError(f"{path}: {name} has shape {stored.shape}, the model needs {entry.shape}.")
    spec = entry.spec
    if spec is None:
        return reader.read(stored)
    return reader.read(stored, spec.dim, spec.ranges(mesh.parts.size, mesh.parts.rank))
