"""`training_state.json`: what the tensors of a training state are, read as strictly as it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_parallel.checkpoints.folders import STATE
from hf_parallel.checkpoints.manifest import is_count, read_json
from hf_parallel.errors import CheckpointError


TENSORS = "training_state"
DESCRIPTION = "training_state.json"
FORMAT = 1


def read_description(folder: Path) -> dict[str, Any]:
    """The content of `training_state.json`.

    Raises:
        CheckpointError: There is none, it cannot be read, says what no save says, or is of another version.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: the checkpoint holds weights only (save_only_model), or was written by a Trainer "
            "without hf_parallel. Start a new run from its weights; or resume it in one process with HFParallelCallback, "
            "whose next checkpoint fits any layout."
        )
    found = read_json(path)
    version = found.get("format")
    if version is None:
        raise CheckpointError(f"{path} cannot be read: it has no format. It is truncated or damaged.")
    if version != FORMAT or type(version) is not int:
        raise CheckpointError(
            f"{path} has format {version!r:.60}, this version reads {FORMAT}. Use the version that wrote it."
        )
    odd = next((key for key, is_right in RULES.items() if not is_right(found.get(key))), None)
    if odd is not None:
        raise CheckpointError(
            f"{path} cannot be read: {odd}={found.get(odd)!r:.100} is not what a save writes. It is truncated or damaged."
        )
    return found


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_mesh(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() - {"sp_size", "dp_inside"} != {"dp_size", "pp_size", "tp_size"}:
        return False
    return all(is_count(size) and size > 0 for size in value.values())


def _are_groups(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and _are_names(each.get("params")) for each in value)


def _is_wire(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and isinstance(value.get("method"), dict) and _is_positive(value.get("dp_size"))


def _is_positive(value: object) -> bool:
    return is_count(value) and value != 0


RULES: Mapping[str, Callable[[Any], bool]] = {
    "mesh": _is_mesh,
    "optimizer": lambda value: isinstance(value, str),
    "groups": _are_groups,
    "replicas": lambda value: value is None or _is_positive(value),
    "wire": _is_wire,
    "dropout_step": lambda value: value is None or is_count(value),
    "tensors": _are_names,
    "numbers": lambda value: isinstance(value, dict),
    "parameters": lambda value: value is None or _are_names(value),
    "scaler": lambda value: value is None or type(value) is bool,
}


def check_trainer_state(folder: Path) -> None:
    """Refuse a state of the Trainer from which stock code would go on at a wrong step.

    Raises:
        CheckpointError: It is missing or damaged, or says a step that cannot be.
    """
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: without it training would begin at step 0. Resume from another checkpoint."
        )
    found = read_json(path)
    if not is_count(found.get("global_step")):
        raise CheckpointError(
            f"{path} cannot be read: global_step={found.get('global_step')!r:.60} is not a number of steps. It is damaged; "
            "resume from another checkpoint."
        )
    epoch = found.get("epoch")
    if epoch is not None and not (type(epoch) in (int, float) and epoch >= 0 and math.isfinite(epoch)):
        raise CheckpointError(
            f"{path} cannot be read: epoch={epoch!r:.60} is not an epoch. It is damaged; resume from another checkpoint."
        )
