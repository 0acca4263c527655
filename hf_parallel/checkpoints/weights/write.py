"""A parallelized model as a Hugging Face folder, one tensor at a time.

Names, dtypes, shards and bytes are those of a `save_pretrained` of the whole model in one process. Every rank makes the same
plan from the ledger; the files are made with their headers, and tensors are put where they belong as they arrive, so the
writer holds no more than the tensors that are converted together.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from transformers import PreTrainedModel

from hf_parallel.checkpoints.agree import raise_anywhere
from hf_parallel.checkpoints.folders import STAGING
from hf_parallel.checkpoints.memory import is_in_memory
from hf_parallel.checkpoints.weights.conversions import Group, groups_to_save
from hf_parallel.checkpoints.weights.gather import WEIGHTS, WEIGHTS_INDEX, gather_tensors
from hf_parallel.checkpoints.weights.writer import Stored, lay_out, read_header, write
from hf_parallel.compat.private_torch import id_of_storage
from hf_parallel.compat.private_transformers import weight_transforms, weights_left_out
from hf_parallel.errors import CheckpointError
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.ledger import Ledger
from hf_parallel.logs import told_if_slow
from hf_parallel.mesh.groups import Mesh


logger = logging.getLogger(__name__)

MAX_SHARD_SIZE = "50GB"  # the default of `save_pretrained`
METADATA = {"format": "pt"}
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class Export:
    """Content of a folder that is about to be written, the same on every rank.

    Args:
        groups: Tensors that are gathered and converted together, in order.
        files: File name -> shapes and dtypes of the tensors in it, by name.
        index: Index of several files; None for one.
    """

    groups: Sequence[Group]
    files: Mapping[str, Mapping[str, torch.Tensor]]
    index: Mapping[str, object] | None


def streams(model: nn.Module) -> bool:
    """Whether `model` is written tensor by tensor: adapters are not, they have a format of their own."""
    return isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config")


def plan_export(model: PreTrainedModel, ledger: Ledger, max_shard_size: str | int = MAX_SHARD_SIZE) -> Export:
    """Plan the files of a folder with the whole model; pure.

    Args:
        model: The model, cut and sharded; only its rules of names are read.
        ledger: Its ledger.
        max_shard_size: Size of the files, as in `save_pretrained`.

    Raises:
        CheckpointError: Two tensors would get one name.
    """
    names = saved_names(ledger, *weights_left_out(model))
    entries = {name: ledger.find(name) for name in names}
    shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in entries.items()}
    groups = groups_to_save(weight_transforms(model), names)
    made: dict[str, torch.Tensor] = {}
    for group in groups:
        more = group.convert(shapes, model)
        twice = sorted(more.keys() & made.keys())
        if twice:
            raise CheckpointError(
                f"{type(model).__name__}: two of its tensors would be saved as {twice[0]}. Save it with "
                "accelerator.get_state_dict(model) and save_pretrained(state_dict=..., save_original_format=False)."
            )
        made |= more
    split = split_state_dict_into_shards_factory(
        made,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: id_of_storage(
            tensor.untyped_storage()
        ),  # results that share memory go into one file
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    files = {file: {name: made[name] for name in held} for file, held in split.filename_to_tensors.items()}
    if not split.is_sharded:
        return Export(groups, files, None)
    total = sum(torch.Size(entry.shape).numel() for entry in ledger if entry.kind == "param")
    index = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": split.tensor_to_filename}
    return Export(groups, files, index)


def saved_names(ledger: Ledger, ignored: Sequence[str], tied: Sequence[str]) -> list[str]:
    """The names under which tensors are saved, in the order of the model's state dict.

    Args:
        ledger: The model's ledger.
        ignored: Names that are not saved.
        tied: Patterns of names that are not saved if the tensor has another.

    Source: transformers 5.23, `modeling_utils.remove_tied_weights_from_state_dict`.
    """
    chosen = set()
    for entry in ledger:
        names = sorted(name for name in entry.state_names if name not in ignored)
        spare = [name for name in names if any(re.search(pattern, name) for pattern in tied)][: len(names) - 1]
        chosen |= set([name for name in ledger.names if name in names and name not in spare][:1])
    return [name for name in ledger.names if name in chosen]


def write_weights(
    export: Export,
    folder: Path | None,
    model: PreTrainedModel,
    ledger: Ledger,
    held: Mapping[str, torch.Tensor],
    mesh: Mesh,
    watchdog: Watchdog,
) -> None:
    """Write the weights into a folder; collective.

    Args:
        export: The planned content of the folder.
        folder: Folder that world rank 0 writes to.
        model: The model.
        ledger: Its ledger.
        held: Ledger name -> this rank's tensor or shard.
        mesh: This rank's mesh.
        watchdog: For waits.

    Raises:
        CheckpointError: Something cannot be written, or is not there afterwards; the same text on every rank.
    """
    places: dict[str, Stored] = {}
    problem: str | Exception | None = None
    writes = mesh.rank == 0 and folder is not None
    try:
        if writes and folder is not None:
            for file, tensors in export.files.items():
                places |= lay_out(folder / file, tensors, METADATA)
    except OSError as error:
        problem = f"{folder}: weights cannot be written: {error.strerror}."
    raise_anywhere(problem)
    with told_if_slow(partial(_tell, folder if writes else None)):
        for group in export.groups:
            entries = [ledger.find(name) for name in group.names]
            wanted = Ledger({entry.name: entry for entry in entries})
            with watchdog.waiting(f"waits for {group.target} on its way to the writer"):
                found = gather_tensors(wanted, held, mesh)
            if writes and problem is None:
                try:
                    for name, tensor in group.convert(
                        {n: found[ledger.find(n).name] for n in group.names}, model
                    ).items():
                        write(places[name], tensor)
                except Exception as error:  # noqa: BLE001  raised below, on every rank: the others go on sending
                    problem = error
            del found
    if writes and folder is not None and problem is None:
        problem = _finish(export, folder)
    with watchdog.waiting("waits for the weights to be written"):
        raise_anywhere(problem)


def _tell(folder: Path | None) -> None:
    if folder is not None:
        logger.info("hf_parallel: writes the weights to %s ...", _at_the_end(folder))


def _at_the_end(folder: Path) -> Path:
    """The final place of a folder that is still being written; see `folders.STAGING`."""
    return Path(*(part for part in folder.parts if part != STAGING))


def _finish(export: Export, folder: Path) -> str | None:
    """Write the index and look at what is on disk; returns what is wrong."""
    try:
        if export.index is not None:
            (folder / WEIGHTS_INDEX).write_text(json.dumps(export.index, indent=2, sort_keys=True) + "\n")
        for file, tensors in export.files.items():
            found = {name: (one.dtype, one.shape) for name, one in read_header(folder / file).items()}
            wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            if found != wanted:
                odd = min(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
                return f"{folder / file}: {odd} is {found.get(odd)} on disk and {wanted.get(odd)} in the model."
    except OSError as error:
        return f"{folder}: weights cannot be written: {error.strerror}."
    except CheckpointError as error:
        return str(error)
    return None


def move_files(staging: Path, folder: Path) -> None:
    """Move a finished folder's files over those of `folder`, weights last, the index after them; drop older weights."""
    files = sorted(staging.iterdir(), key=lambda path: (path.name.startswith("model"), path.name == WEIGHTS_INDEX))
    written = {path.name for path in files if WEIGHT_FILE.fullmatch(path.name)}
    for path in files:
        if (folder / path.name).is_dir():
            shutil.rmtree(folder / path.name)
        os.replace(path, folder / path.name)
    for path in folder.iterdir() if written else ():
        if WEIGHT_FILE.fullmatch(path.name) and path.name not in written:
            path.unlink()
    staging.rmdir()


def move_in(staging: Path, folder: Path, export: Export) -> None:
    """Like `move_files`, and log what was written."""
    move_files(staging, folder)
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in export.files.values()]
    count = sum(len(tensors) for tensors in export.files.values())
    what = f"{count} tensors, {sum(sizes) / 1e9:.2f} GB, in {len(sizes)} file{'s' * (len(sizes) > 1)}"
    level = logging.DEBUG if is_in_memory(folder) else logging.INFO  # those may be as many as steps
    place = _at_the_end(folder)
    logger.log(level, "hf_parallel: saved %s to %s (%s)", what, place, WEIGHTS if len(sizes) == 1 else WEIGHTS_INDEX)
