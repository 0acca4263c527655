"""A run that its launcher starts again goes on by itself, from the newest checkpoint on disk or in memory.

A checkpoint of a launched run says which launcher started it, so that a restart tells its own checkpoints from those of an
earlier run in the same folder: a launcher lives on while its workers are replaced.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from hf_parallel.checkpoints.agree import everyone
from hf_parallel.checkpoints.folders import complete_folders
from hf_parallel.checkpoints.manifest import load_manifest
from hf_parallel.checkpoints.memory import SHARED_MEMORY, memory_folder, remove_memory_folder
from hf_parallel.checkpoints.state.description import DESCRIPTION
from hf_parallel.errors import CheckpointError, ConfigError
from hf_parallel.machine.processes import identity_of
from hf_parallel.mesh.ranks import ranks_per_node
from hf_parallel.settings.launch import launcher_pid
from hf_parallel.settings.sections import CheckpointConfig
from hf_parallel.trainer.resuming import ResumeMixin, step_of


logger = logging.getLogger(__name__)

RESTARTED = "TORCHELASTIC_RESTART_COUNT"  # set by the launchers of accelerate and torch, as the next
RUN_ID = "TORCHELASTIC_RUN_ID"


def launch_of_this_process() -> str | None:
    """Identity of the launcher that started this process, if it is one that starts processes again."""
    pid = launcher_pid(os.getpid()) if RUN_ID in os.environ else None
    return None if pid is None else identity_of(pid)


def is_of_launch(run: Mapping[str, Any] | None, launches: Sequence[str], call: int, here: str) -> bool:
    """Whether a checkpoint was written by other processes of the same launch, in the same call of `train()`.

    Args:
        run: Facts of the run in its manifest.
        launches: Launchers of the ranks.
        call: Number of the call of `train()` with its output_dir that asks, from 0: Trainers of a script may share a
            folder.
        here: The process of rank 0.
    """
    if run is None or run["call"] != call or run["writer"] == here:
        return False
    return not set(launches).isdisjoint(run["launches"])


class RestartMixin(ResumeMixin):
    """Going on after a restart, and checkpoints in memory."""

    _hf_parallel_checkpoint: CheckpointConfig = CheckpointConfig()  # of a process that trains alone
    # Of `train()` in this process, whichever Trainer's, by the folder that checkpoints go to.
    _hf_parallel_calls: ClassVar[Counter[Path]] = Counter()
    _hf_parallel_run: dict[str, Any] | None = None  # what checkpoints say of this run

    @property
    def _checkpoint_settings(self) -> CheckpointConfig:
        session = self.hf_parallel_session
        return self._hf_parallel_checkpoint if session is None else session.config.checkpoint

    @property
    def _run_dirs(self) -> list[Path]:
        """Folders with checkpoints of this run: on disk, and in memory if some are written there."""
        disk = Path(self.args.output_dir or ".")
        return [disk, memory_folder(disk)] if self._checkpoint_settings.memory_steps else [disk]

    def _begin_run(self, wanted: str | bool | None) -> str | bool | None:
        """The checkpoint to resume from: what the user wants, else what this launch wrote before it started these processes.

        Raises:
            CheckpointError: It has another number of rows in a step than this world, which would go on with other rows.
        """
        folder = Path(self.args.output_dir or ".").resolve()
        call = self._hf_parallel_calls[folder]
        self._hf_parallel_calls[folder] += 1
        launches = [each for each in everyone(launch_of_this_process()) if each is not None]
        here = identity_of(os.getpid()) or ""
        rows = self.get_total_train_batch_size(self.args)
        run = {"launches": sorted(set(launches)), "writer": here, "call": call, "rows": rows}
        self._hf_parallel_run = run if launches else None
        settings = self._checkpoint_settings
        if wanted is None and launches and settings.auto_resume:
            wanted = self._own_checkpoint(launches, call, here, rows)
        if not wanted and settings.memory_steps and self._hf_parallel_mesh.rank == 0:
            remove_memory_folder(self._run_dirs[-1])
        return wanted

    def _own_checkpoint(self, launches: list[str], call: int, here: str, rows: int) -> str | None:
        """The newest complete checkpoint of this launch, the same on every rank."""
        found: list[Any] = [None]
        with self._together(self._run_dirs[0], "look for checkpoints of this launch", writes=False):
            if self._hf_parallel_mesh.rank == 0:
                found = [self._look(launches, call, here)]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return None
        folder, saved = found[0]
        if saved != rows:
            raise CheckpointError(
                f"{folder} was written with {saved} rows in an optimizer step, and a step of this restart has {rows} "
                f"({self._hf_parallel_mesh.shape.dp_size} replicas): the run would go on with other rows. Set global_batch_size: "
                f"{saved}, start as many processes as before, or pass resume_from_checkpoint to train()."
            )
        return str(folder)

    def _look(self, launches: list[str], call: int, here: str) -> tuple[str, int] | None:
        """Find, on rank 0, the newest checkpoint of this launch, and how many rows its steps had."""
        found = []
        for run_dir in self._run_dirs:
            for folder in complete_folders(run_dir):
                listed = load_manifest(folder)
                run = None if listed is None else listed.run
                if run is not None and is_of_launch(run, launches, call, here) and (folder / DESCRIPTION).is_file():
                    found.append((step_of(folder), folder, run["rows"]))
                    break
        count = os.environ.get(RESTARTED, "0")
        if not found:
            if count != "0":
                logger.warning(
                    "hf_parallel: restart %s: this launch has no complete checkpoint in %s yet, so the run begins anew.",
                    count,
                    " or ".join(map(str, self._run_dirs)),
                )
            return None
        step, folder, rows = max(found, key=lambda each: each[0])
        logger.warning("hf_parallel: restart %s: the run goes on after step %d, from %s.", count, step, folder)
        return str(folder), rows

    def _memory_due(self) -> bool:
        """Whether the step that has just ended is to be kept in memory."""
        every, state = self._checkpoint_settings.memory_steps, self.state
        return self._hf_parallel_checkpoints and every > 0 and state.global_step % every == 0 < state.global_step

    def _end_run(self) -> None:
        """Give the memory back that checkpoints of this run have."""
        if self._hf_parallel_checkpoints and self._checkpoint_settings.memory_steps:
            with self._together(self._run_dirs[0], "end the run"):
                if self._hf_parallel_mesh.rank == 0:
                    remove_memory_folder(self._run_dirs[-1])


def refuse_memory(settings: CheckpointConfig, world_size: int, *, only_model: bool) -> None:
    """Refuse checkpoints in memory that nobody could go on from.

    Raises:
        ConfigError: There are several machines, no memory that outlives a process, or no training state.
    """
    every = settings.memory_steps
    if not every:
        return
    machines, fix = max(1, world_size // ranks_per_node()), "Set checkpoint.memory_steps to 0, and save to disk."
    if machines > 1:
        raise ConfigError(
            f"checkpoint.memory_steps={every} on {machines} machines: none can read what is in the memory of another. {fix}"
        )
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"checkpoint.memory_steps={every} needs {SHARED_MEMORY}, which this machine does not have: memory that outlives a process. "
            f"{fix}"
        )
    if only_model:
        raise ConfigError(
            f"checkpoint.memory_steps={every} with save_only_model=True: no run can go on from weights alone. Set "
            "checkpoint.memory_steps to 0, or leave save_only_model out."
        )
