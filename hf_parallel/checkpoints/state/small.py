"""The small files of a checkpoint that are written as the stock Trainer writes them: scheduler, loss scaler, random states.

They are pickles in the form of `torch.save`, and read with `weights_only`: numbers, tensors and containers, no code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_pt_utils import safe_globals

from hf_parallel.checkpoints.reader import open_regular
from hf_parallel.errors import CheckpointError


SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
RANDOM = ("python", "numpy", "cpu")  # what every random state has
OF_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
ONE_OF_MANY = re.compile(r"rng_state(_[0-9]+)?\.pth")


def rng_file(rank: int, world_size: int) -> str:
    """Name of the file with a rank's random states."""
    return "rng_state.pth" if world_size <= 1 else f"rng_state_{rank}.pth"


def load_small(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """The mapping in a file.

    Args:
        path: The file.
        keys: Keys that must be in it.

    Raises:
        CheckpointError: It is missing, truncated, damaged, or holds something else; names it.
    """
    advice = "Resume from another checkpoint."
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}. {advice}") from error
    try:
        with open(descriptor, "rb") as file, safe_globals():
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises nearly anything
        what = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {what} The file is truncated or damaged. {advice}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} instead of a mapping: it is damaged. {advice}")
    lacking = [key for key in keys if key not in found]
    if lacking:
        raise CheckpointError(
            f"{path} has no {', '.join(lacking)}: it is damaged, or not what its name says. {advice}"
        )
    return found


def check_random_states(folder: Path, world_size: int) -> None:
    """Refuse a folder with other random states than those of the ranks that saved it.

    Raises:
        CheckpointError: Names the file that is missing or has no place there.
    """
    wanted = {rng_file(rank, world_size) for rank in range(world_size)}
    found = {path.name for path in folder.iterdir() if ONE_OF_MANY.fullmatch(path.name)}
    lacking, stray = sorted(wanted - found), sorted(found - wanted)
    if lacking:
        raise CheckpointError(
            f"{folder / lacking[0]} does not exist, and {world_size} ranks saved the checkpoint: it is incomplete. Resume from "
            "another one."
        )
    if stray:
        raise CheckpointError(
            f"{folder / stray[0]} is the random state of a rank that did not exist: {world_size} ranks saved the "
            "checkpoint. It belongs to another checkpoint; move it away, or resume from another checkpoint."
        )


def check_scaler(folder: Path, saved: bool | None, has_scaler: bool) -> dict[str, Any] | None:
    """The state of the loss scaler, None if there is none.

    Args:
        folder: The checkpoint.
        saved: Whether the run that saved it had one, None if the checkpoint does not say.
        has_scaler: Whether this run has one in use.

    Raises:
        CheckpointError: It is missing or damaged, or only one of the two runs has one.
    """
    path = folder / SCALER
    if not path.exists():
        if saved:
            raise CheckpointError(
                f"{path} does not exist, and the run that saved the checkpoint had a loss scaler (fp16): it is incomplete. "
                "Resume from another one."
            )
        return None
    state = load_small(path)
    if saved is False:
        raise CheckpointError(
            f"{path} is the state of a loss scaler, and the run that saved the checkpoint had none: it belongs to "
            "another checkpoint. Move it away, or resume from another checkpoint."
        )
    if not state and not has_scaler:
        return None  # of one that was not in use either
    state = load_small(path, OF_SCALER)
    if not has_scaler:
        raise CheckpointError(
            f"{path} is the state of a loss scaler, which a run with fp16=True has and this one has not. Resume with "
            "fp16=True; or start a new run from the weights of the checkpoint (`hf-parallel merge`)."
        )
    scale = state["scale"]
    if not isinstance(scale, (int, float)) or not (scale > 0 and math.isfinite(scale)):
        raise CheckpointError(f"{path} says scale={scale!r:.60}: it is damaged. Resume from another checkpoint.")
    return state
