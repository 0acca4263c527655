"""A training checkpoint as one plain Hugging Face folder: the model without the training state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from filecmp import cmp
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from hf_parallel.checkpoints.folders import files_of, publish, read_manifest, verify
from hf_parallel.checkpoints.manifest import DROPPINGS, read_json
from hf_parallel.checkpoints.state.stock import write_stock_state
from hf_parallel.checkpoints.weights.adapters import ADAPTER_CONFIG, ADAPTERS
from hf_parallel.checkpoints.weights.gather import CONFIG, WEIGHTS_INDEX, weight_files
from hf_parallel.checkpoints.weights.write import METADATA, WEIGHT_FILE
from hf_parallel.checkpoints.weights.writer import Reader, Stored, lay_out, write
from hf_parallel.errors import CheckpointError


OF_TRAINING: Final = (
    "training_state*",
    "training_args*",
    "trainer_state.json",
    "optimizer*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "pipeline_state.json",
    "manifest.json",
    "pytorch_model*",
    ".*",
)


@dataclass(frozen=True)
class Merged:
    """The files that `merge` wrote.

    Args:
        num_tensors: Tensors.
        num_bytes: Their bytes.
        files: Names of the weight files.
        trainer_state: Whether a stock Trainer can resume from it.
    """

    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    trainer_state: bool = False


def merge(checkpoint: Path, folder: Path, max_shard_size: str = "50GB", *, trainer_state: bool = False) -> Merged:
    """Copy the model of a checkpoint into a folder of its own, one tensor at a time; of a PEFT model its adapters.

    The checkpoint is compared with its manifest first, and the copy is read back. The folder appears when it is complete.

    Args:
        checkpoint: A folder `checkpoint-N`.
        folder: Folder to write; must not exist, or be empty.
        max_shard_size: Size of the files, as in `save_pretrained`.
        trainer_state: Also write what a stock Trainer resumes from. Takes memory for the whole optimizer state.

    Raises:
        CheckpointError: The checkpoint is damaged, has no model, or the folder is taken; names the file and the tensor.
    """
    has_adapters = any(checkpoint.glob("adapter_model*"))
    stored = _adapters_of(checkpoint) if has_adapters else _model_of(checkpoint)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty. Name a folder that does not exist.")
    staging = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for name in _beside_weights(checkpoint):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, staging / name, follow_symlinks=False)
        if has_adapters:
            files = [ADAPTERS]  # beside no weights of a model, and copied by now
            if not cmp(checkpoint / ADAPTERS, staging / ADAPTERS, shallow=False):
                raise CheckpointError(f"{folder / ADAPTERS} is not on disk as it was written.")
        else:
            files = _copy_weights(stored, staging, max_shard_size, _parameters_of(checkpoint))
        if trainer_state:
            write_stock_state(checkpoint, staging)
        publish(staging, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Merged(len(stored), sum(one.nbytes for one in stored.values()), tuple(files), trainer_state)


def _beside_weights(checkpoint: Path) -> Iterator[str]:
    """Names of the model's other files."""
    for name in sorted(read_manifest(checkpoint) or files_of(checkpoint)):
        first, last = name.split("/")[0], name.rsplit("/", 1)[-1]
        of_training = any(fnmatch(first, pattern) for pattern in OF_TRAINING)
        if not (of_training or WEIGHT_FILE.fullmatch(name) or DROPPINGS.fullmatch(last)):
            yield name


def _model_of(checkpoint: Path) -> dict[str, Stored]:
    """Every tensor of the model; the checkpoint is whole."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is not a folder.")
    if not (checkpoint / CONFIG).is_file():
        raise CheckpointError(f"{checkpoint} has no {CONFIG}: it is not a checkpoint of a model.")
    verify(checkpoint)
    with Reader() as reader:
        return {name: reader.find(path, name) for name, path in weight_files(checkpoint, reader).items()}


def _adapters_of(checkpoint: Path) -> dict[str, Stored]:
    """Every tensor of the adapters; the checkpoint is whole."""
    if not (checkpoint / ADAPTERS).is_file() or not (checkpoint / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {ADAPTERS} or no {ADAPTER_CONFIG}: it is not a checkpoint of adapters that hf_parallel wrote."
        )
    verify(checkpoint)
    with Reader() as reader:
        return dict(reader.tensors(checkpoint / ADAPTERS))


def _parameters_of(checkpoint: Path) -> dict[str, object]:
    """The number of parameters that the index of a checkpoint with several files gives."""
    index = checkpoint / WEIGHTS_INDEX
    metadata: dict[str, object] = read_json(index).get("metadata", {}) if index.is_file() else {}
    return {name: value for name, value in metadata.items() if name == "total_parameters"}


def _copy_weights(stored: dict[str, Stored], folder: Path, size: str, facts: dict[str, object]) -> list[str]:
    shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=size)
    reader = Reader()
    for file, names in split.filename_to_tensors.items():
        places = lay_out(folder / file, {name: shapes[name] for name in names}, METADATA)
        for name in names:
            tensor = reader.read(stored[name])
            write(places[name], tensor)
            if not torch.equal(
                reader.read(places[name]).view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
            ):
                raise CheckpointError(f"{folder / file}: {name} is not on disk as it was written.")
    if split.is_sharded:
        index = {"metadata": {**facts, **split.metadata}, "weight_map": split.tensor_to_filename}
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return list(split.filename_to_tensors)
