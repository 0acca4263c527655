"""The training state of a checkpoint in the files that a stock Trainer resumes from.

The stock Trainer knows a parameter by its place among the optimizer's groups, and reads `optimizer.pt` whole, so this needs
memory for the optimizer state of the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_parallel.checkpoints.folders import STATE
from hf_parallel.checkpoints.state.dcp import TensorIndex
from hf_parallel.checkpoints.state.description import (
    DESCRIPTION,
    TENSORS,
    check_trainer_state,
    read_description,
)
from hf_parallel.checkpoints.state.note import without_note
from hf_parallel.checkpoints.state.optimizer import MASTER_WEIGHT, PREFIX, SEPARATOR, WHOLE, decode
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.small import RANDOM, SCALER, SCHEDULER, load_small, rng_file
from hf_parallel.errors import CheckpointError
from hf_parallel.mesh.shape import MeshShape


OPTIMIZER = "optimizer.pt"


def write_stock_state(checkpoint: Path, folder: Path) -> None:
    """Write what a stock Trainer resumes from beside the model.

    Args:
        checkpoint: A folder `checkpoint-N` whose files were compared with its manifest.
        folder: Folder to write to.

    Raises:
        CheckpointError: The checkpoint has no training state, a damaged one, or one that only its own layout can take up.
    """
    check_trainer_state(checkpoint)
    description = read_description(checkpoint)
    torch.save(_optimizer_state(checkpoint, description), folder / OPTIMIZER)
    for name in (SCHEDULER, SCALER):
        if (checkpoint / name).is_file():
            load_small(checkpoint / name)
            shutil.copyfile(checkpoint / name, folder / name)
    (folder / STATE).write_text(json.dumps(without_note(checkpoint / STATE), indent=2, sort_keys=True) + "\n")
    _write_random_states(checkpoint, folder, MeshShape(**description["mesh"]))


def _optimizer_state(checkpoint: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    order = description.get("parameters")
    cut = description["mesh"]["pp_size"] > 1  # the groups were put together from those of the stages
    if order is None and cut:
        raise CheckpointError(
            f"{checkpoint / DESCRIPTION} does not say in which order the model has its parameters: an older version wrote "
            "it. Resume it with this version; its next checkpoint can be merged."
        )
    place = {name: index for index, name in enumerate(order or ())}
    index = TensorIndex(checkpoint / TENSORS)
    mark = "" if description["replicas"] is None else "@dp0"
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    found = _by_parameter([*index.tensors, *description["numbers"]], mark)
    for group in description["groups"]:
        unknown = [name for name in group["params"] if cut and name not in place]
        if unknown:
            raise CheckpointError(
                f"{checkpoint / DESCRIPTION}: {unknown[0]} is no parameter of the model. It is damaged."
            )
        names = sorted(group["params"], key=place.__getitem__) if cut else group["params"]
        first = sum(len(each["params"]) for each in groups)
        settings = {key: _plain(decode(value)) for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": list(range(first, first + len(names)))})
        for position, name in enumerate(names, first):
            values = {
                key: _value(index, label, description["numbers"])
                for key, label in found.get(name, {}).items()
                if key != MASTER_WEIGHT
            }
            if values:
                state[position] = values
    return {"state": state, "param_groups": groups}


def _by_parameter(labels: Iterable[str], mark: str) -> dict[str, dict[str, str]]:
    """Parameter -> key of its state -> label, of one replica's state.

    Raises:
        CheckpointError: A statistic is of a tensor-parallel shard.
    """
    found: dict[str, dict[str, str]] = {}
    for label in labels:
        if not label.startswith(PREFIX):
            continue
        name, key = label.removeprefix(PREFIX).rsplit(SEPARATOR, 1)
        if "@tp" in key:
            raise CheckpointError(
                f"{label} is a statistic of one tensor-parallel shard: a stock Trainer, which holds the whole tensor, "
                "cannot load it. Resume with the tp_size it was saved with, or merge without --trainer-state."
            )
        key = key.removesuffix(WHOLE)
        if mark and not key.endswith(mark):
            continue
        found.setdefault(name, {})[key.removesuffix(mark)] = label
    return found


def _value(index: TensorIndex, label: str, numbers: Mapping[str, Any]) -> Any:
    if label in numbers:
        return decode(numbers[label])
    shape, dtype = index.tensors[label]
    whole = torch.zeros(shape, dtype=dtype)
    index.read([Piece(label, shape, (0,) * len(shape), whole)])
    return whole


def _plain(value: Any) -> Any:
    """JSON has no tuples, which is what optimizers give for pairs such as betas."""
    return tuple(value) if isinstance(value, list) else value


def _write_random_states(checkpoint: Path, folder: Path, saved: MeshShape) -> None:
    """Write the random states of one process, and of as many as there were copies of the model."""
    for replica in range(saved.dp_size):
        source = checkpoint / rng_file(saved.rank_at(replica, 0, 0), saved.world_size)
        state = load_small(source, RANDOM)
        if replica == 0:
            torch.save({key: _of_first_device(value) for key, value in state.items()}, folder / rng_file(0, 1))
        if saved.dp_size > 1:
            torch.save(state, folder / rng_file(replica, saved.dp_size))


def _of_first_device(value: Any) -> Any:
    """Several processes keep a list over devices, one process the state of its own."""
    tensors: Sequence[Any] = value if isinstance(value, list) and value else ()
    return tensors[0] if tensors and all(isinstance(each, torch.Tensor) for each in tensors) else value
