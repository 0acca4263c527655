"""The state of a loop of one's own in a folder: what `accelerator.save_state` and `load_state` write and read.

Weights and optimizer are those of a Trainer's checkpoint (see `state`), so any layout reads them. The folder may hold other
files of the user, so it is filled in place: a list of what belongs to it is written last, and taken away first.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.checkpointing import load_custom_state, save_custom_state
from transformers.utils import logging

from hf_parallel.checkpoints.agree import everyone, together
from hf_parallel.checkpoints.folders import STAGING, FileRecord, files_of, record
from hf_parallel.checkpoints.state.groups import of_these_groups
from hf_parallel.checkpoints.state.training_state import (
    load_training_state,
    rng_source,
    snapshot,
    write_snapshot,
)
from hf_parallel.checkpoints.weights.gather import check_config
from hf_parallel.compat.private_accelerate import prepared_by
from hf_parallel.engine.run.engine import Engine
from hf_parallel.errors import CheckpointError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.trainer.accelerator import HFParallelAccelerator
from hf_parallel.trainer.drift import refuse_drift_of
from hf_parallel.trainer.holdings import dropout_step, holdings_of, load_held_weights, resume_dropout
from hf_parallel.trainer.model_folder import whole_state, write_model
from hf_parallel.trainer.prepared import bare_optimizer


logger = logging.get_logger(__name__)
LISTING = "hf_parallel_state.json"
PARTS = "parts.pt"
FORMAT = 1
OURS = re.compile(r"parts\.pt|rank_[0-9]+\.pt|custom_checkpoint_[0-9]+\.pkl|training_state.*|optimizer_[0-9]+")


def save_loop_state(accelerator: HFParallelAccelerator, folder: Path, *, replaces: bool) -> None:
    """Write everything that a loop carries from step to step; collective.

    Args:
        accelerator: With the prepared model, optimizers, schedulers and loaders.
        folder: Folder to write to; files of others in it stay.
        replaces: Whether there may be a state already.

    Raises:
        CheckpointError: Something cannot be written; the same on every rank.
        RankMismatchError: Replicas have different weights; on every rank.
    """
    engine, mesh = accelerator.hf_parallel_engine, accelerator.hf_parallel.mesh
    staging, waiting = folder / STAGING, engine.attachment.watchdog.waiting
    engine.gradients.replicas.synchronise()
    said = refuse_drift_of(engine)
    if said:
        logger.warning("hf_parallel: %s", said)
    with waiting("waits for rank 0 to prepare the folder"), together(mesh, folder):
        if mesh.rank == 0:
            if not replaces and folder.exists():
                raise CheckpointError(
                    "it exists already. Set accelerator.project_configuration.iteration to the next number"
                )
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
    _write_weights(accelerator, engine, folder, staging)
    holdings, step = holdings_of(engine, accelerator.hf_parallel.config), dropout_step(engine)
    prepared = prepared_by(accelerator)
    schedulers = [scheduler.state_dict() for scheduler in prepared.schedulers]
    for index, optimizer in enumerate(prepared.optimizers):
        part = _part(staging, index)
        with together(mesh, folder):
            part.mkdir(exist_ok=True)
        with waiting("waits for the other ranks to write the training state"):
            taken = snapshot(part, holdings, bare_optimizer(optimizer), step)
            for place in _scheduling(accelerator, optimizer):
                schedulers[place] = taken.groups.whole(schedulers[place])
            write_snapshot(part, taken, mesh)
    with waiting("waits for the other ranks to write their part"), together(mesh, folder):
        torch.save(_own(accelerator), staging / f"rank_{mesh.rank}.pt")
        if mesh.rank == 0:
            torch.save(_common(accelerator) | {"schedulers": schedulers}, staging / PARTS)
            for index, item in enumerate(prepared.registered):
                save_custom_state(item, staging, index)
    _put_in_place(folder, staging, mesh, accelerator)


def _write_weights(accelerator: HFParallelAccelerator, engine: Engine, folder: Path, staging: Path) -> None:
    """Write the model; hooks that were registered may write it themselves, and then take it out of their list."""
    hooks = prepared_by(accelerator).before_save
    if hooks:
        weights = [whole_state(engine)]
        for hook in hooks:
            hook([engine.model], weights, str(folder))
        if not everyone(len(weights))[0]:
            return
    write_model(engine, _own_save(engine), staging)


def _own_save(engine: Engine) -> Any:
    """The `save_pretrained` of the model's class: that of the object is collective."""
    kind: Any = type(engine.model)
    save = getattr(kind, "save_pretrained", None)
    return None if save is None else save.__get__(engine.model)


def _own(accelerator: HFParallelAccelerator) -> dict[str, Any]:
    """State that each rank has for itself: random states, and the positions of its loaders."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    loaders = [
        loader.state_dict() if getattr(loader, "use_stateful_dataloader", False) else None
        for loader in prepared_by(accelerator).loaders
    ]
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "cpu": torch.get_rng_state(),
        "loaders": loaders,
    }
    if accelerator.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return states


def _common(accelerator: HFParallelAccelerator) -> dict[str, Any]:
    return {
        "step": accelerator.step,
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
    }


def _scheduling(accelerator: HFParallelAccelerator, optimizer: Any) -> list[int]:
    """Places of the schedulers that set the rates of an optimizer."""
    bare = [getattr(each, "scheduler", each) for each in prepared_by(accelerator).schedulers]
    return [place for place, each in enumerate(bare) if bare_optimizer(each.optimizer) is bare_optimizer(optimizer)]


def _put_in_place(folder: Path, staging: Path, mesh: Mesh, accelerator: HFParallelAccelerator) -> None:
    waiting = accelerator.hf_parallel.watchdog.waiting
    with waiting("waits for the other ranks to bring their files to disk"), together(mesh, folder):
        mine = record(staging, files_of(staging)[mesh.rank :: mesh.shape.world_size])
    files: dict[str, FileRecord] = {}
    for each in everyone(mine):
        files |= each
    shape = mesh.shape
    facts = {
        "format": FORMAT,
        "mesh": shape.sizes,
        **_counts(accelerator),
        "files": {name: [one.bytes, one.sha256] for name, one in sorted(files.items())},
    }
    with waiting("waits for rank 0 to put the files in place"), together(mesh, folder):
        if mesh.rank == 0:
            for name in _forget(folder) - files.keys():
                (folder / name).unlink(missing_ok=True)
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staging / name, folder / name)
            shutil.rmtree(staging)
            (folder / LISTING).write_text(json.dumps(facts, indent=1) + "\n")


def _counts(accelerator: HFParallelAccelerator) -> dict[str, int]:
    """Count the objects that have a state of their own, by kind: the numbers must be the same when it is loaded."""
    prepared = prepared_by(accelerator)
    return {"optimizers": len(prepared.optimizers), "custom": len(prepared.registered)}


def _forget(folder: Path) -> set[str]:
    """Take away the list of an earlier state: until the new one is there, the folder holds none. Returns what it named."""
    path = folder / LISTING
    try:
        found = (
            {name for name in json.loads(path.read_text())["files"] if _is_inside(name)} if path.is_file() else set()
        )
    except (ValueError, KeyError, TypeError):
        found = set()
    path.unlink(missing_ok=True)
    return found


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def load_loop_state(accelerator: HFParallelAccelerator, folder: Path) -> None:
    """Put what `save_loop_state` wrote, under any layout, into what this rank has; collective.

    Raises:
        CheckpointError: The folder is incomplete, damaged or of another run; the same on every rank.
    """
    engine, mesh = accelerator.hf_parallel_engine, accelerator.hf_parallel.mesh
    waiting, holdings = engine.attachment.watchdog.waiting, holdings_of(engine, accelerator.hf_parallel.config)
    with waiting("waits for the other ranks to check the state"), together(mesh, folder, writes=False):
        facts = _checked(folder, mesh, accelerator)
        check_config(folder, getattr(engine.model, "config", None)) if hasattr(engine.model, "config") else None
    models: list[Any] = [engine.model]
    prepared = prepared_by(accelerator)
    for hook in prepared.before_load:
        hook(models, str(folder))
    with waiting("waits for the other ranks to read the weights"), together(mesh, folder, writes=False):
        if models:
            load_held_weights(folder, engine.model, holdings)
        if holdings.replicas is not None:
            holdings.replicas.reloaded()
    with waiting("waits for the other ranks to read the training state"), together(mesh, folder, writes=False):
        parts = _read(folder / PARTS)
        for index, optimizer in enumerate(prepared.optimizers):
            resumed = load_training_state(_part(folder, index), holdings, bare_optimizer(optimizer))
            for place in _scheduling(accelerator, optimizer):
                if place < len(parts["schedulers"]):
                    own = prepared.schedulers[place].state_dict()
                    parts["schedulers"][place] = of_these_groups(parts["schedulers"][place], resumed.order, own)
            resume_dropout(engine, resumed.dropout_step)
        _take_common(accelerator, parts)
        saved = MeshShape(**facts["mesh"])
        _take_own(accelerator, _read(folder / f"rank_{rng_source(saved, mesh)}.pt"), saved == mesh.shape)
        for index, item in enumerate(prepared.registered):
            load_custom_state(item, folder, index)


def _checked(folder: Path, mesh: Mesh, accelerator: HFParallelAccelerator) -> dict[str, Any]:
    """The list of a folder, after its files were compared with it: lengths of all, contents of this rank's share."""
    path = folder / LISTING
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: {folder} is no state that accelerator.save_state() finished writing under hf_parallel. "
            "Load another one; of a state of stock accelerate, load the weights with from_pretrained or load_checkpoint_in_model."
        )
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in facts["files"].items()}
        counts = {kind: int(facts[kind]) for kind in ("optimizers", "custom")}
        MeshShape(**facts["mesh"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}. It is truncated or damaged.") from error
    for name, (size, _) in files.items():
        if not _is_inside(name) or not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise CheckpointError(
                f"{folder / name} is missing or has not the {size} bytes that {LISTING} says: it is damaged."
            )
    for name in list(files)[mesh.rank :: mesh.shape.world_size]:
        if record(folder, [name])[name].sha256 != files[name][1]:
            raise CheckpointError(
                f"{folder / name} is damaged: its content is not what {LISTING} says. Load another state."
            )
    read = [name for name in files_of_state(folder) if name not in files]
    if read or PARTS not in files:
        raise CheckpointError(
            f"{folder / (read[0] if read else PARTS)} is not in {LISTING}: no save wrote it there, and it would be read as a part of the "
            "state. Move it away, or load another state."
        )
    here = _counts(accelerator)
    for kind, count in counts.items():
        if count != here[kind]:
            what = "prepared optimizers" if kind == "optimizers" else "objects of register_for_checkpointing"
            raise CheckpointError(
                f"{folder} has the state of {count} {what}, this run has {here[kind]}. Prepare and register the same ones "
                "before load_state()."
            )
    _refuse_other_counts(folder, MeshShape(**facts["mesh"]).dp_size, mesh.shape.dp_size, accelerator)
    return facts


def files_of_state(folder: Path) -> list[str]:
    """Find the files of a folder that have names of a state, whoever put them there; weights are not looked at."""
    return sorted(
        path.relative_to(folder).as_posix()
        for top in folder.iterdir()
        if OURS.fullmatch(top.name)
        for path in ([top] if top.is_symlink() or not top.is_dir() else top.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    )


def _refuse_other_counts(folder: Path, saved: int, here: int, accelerator: HFParallelAccelerator) -> None:
    """Refuse a scheduler stepped once a replica, whose position is another one with other replicas."""
    steps_often = (each.step_with_optimizer and not each.split_batches for each in prepared_by(accelerator).schedulers)
    if saved != here and any(steps_often):
        raise CheckpointError(
            f"{folder} was saved with {saved} replicas and this run has {here}: accelerate steps a prepared scheduler once a replica "
            f"and update, so its saved position is {saved} an update and it would go on with {here}, at another learning rate. Make "
            "both accelerators with step_scheduler_with_optimizer=False and step the scheduler after each update (if "
            "accelerator.sync_gradients), or load the state with as many replicas."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(f"{path} cannot be read: {error}. It is truncated or damaged.") from error
    return found


def _take_common(accelerator: HFParallelAccelerator, parts: Mapping[str, Any]) -> None:
    saved, here = parts["schedulers"], prepared_by(accelerator).schedulers
    if len(saved) != len(here):
        raise CheckpointError(
            f"the state has {len(saved)} schedulers, this run has prepared {len(here)}. Prepare the same ones before load_state()."
        )
    for scheduler, state in zip(here, saved, strict=True):
        scheduler.load_state_dict(state)
    accelerator.step = parts["step"]
    if accelerator.scaler is not None and parts["scaler"] is not None:
        accelerator.scaler.load_state_dict(parts["scaler"])


def _take_own(accelerator: HFParallelAccelerator, states: Mapping[str, Any], same_layout: bool) -> None:
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["cpu"])
    if accelerator.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], accelerator.device)
    for loader, state in zip(prepared_by(accelerator).loaders, states["loaders"], strict=False):
        if state is None or not getattr(loader, "use_stateful_dataloader", False):
            continue
        if not same_layout:
            raise CheckpointError(
                "the state of a stateful loader fits only the layout it was saved under. Leave use_stateful_dataloader off and "
                "use accelerator.skip_first_batches()."
            )
        loader.load_state_dict(state)


def _part(folder: Path, index: int) -> Path:
    return folder if index == 0 else folder / f"optimizer_{index}"
