"""Checkpoints of a parallel Trainer: made aside, published at one point, resumed under any layout.

The export of the model is the model part of a checkpoint, so that weights are written once and stock code reads them;
what else training carries is in pieces beside it (see `state`). A process that trains alone writes the same, so
that it may go on as several ranks, and the other way round.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from hf_parallel.checkpoints.agree import everyone, together
from hf_parallel.checkpoints.folders import (
    STAGING,
    STATE,
    FileRecord,
    clean,
    files_of,
    publish,
    record,
    rotate,
    write_manifest,
)
from hf_parallel.checkpoints.manifest import OPEN, RUN
from hf_parallel.checkpoints.memory import make_memory_folder
from hf_parallel.checkpoints.state.background import Background, Channels, on_host
from hf_parallel.checkpoints.state.dcp import TensorIndex
from hf_parallel.checkpoints.state.note import add_note, overlooked
from hf_parallel.checkpoints.state.relist import Published, adopt, looks_of, relist
from hf_parallel.checkpoints.state.shared import Claim, require_shared
from hf_parallel.checkpoints.state.small import SCHEDULER
from hf_parallel.checkpoints.state.training_state import TENSORS, Snapshot, snapshot, write_snapshot
from hf_parallel.checkpoints.weights.gather import tensor_names
from hf_parallel.errors import UnsupportedError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.settings.sections import CheckpointConfig
from hf_parallel.trainer.holdings import dropout_step
from hf_parallel.trainer.restarts import RestartMixin
from hf_parallel.trainer.user_code import answers


logger = logging.getLogger(__name__)


class CheckpointMixin(RestartMixin):
    """Checkpoints by all ranks; everything falls back to stock for a Trainer that hf_parallel does not drive."""

    _hf_parallel_staging: Path | None = None
    _hf_parallel_push: bool = False
    _hf_parallel_taken: Snapshot | None = None  # of the save that is being made, if it is written in the background
    _hf_parallel_pending: Background | None = None
    _hf_parallel_channels: Channels | None = None
    _hf_parallel_ready: Callable[[], None] | None = None  # writes a checkpoint, after callbacks had their turn
    _hf_parallel_published: Published | None = None  # a checkpoint that callbacks may add files to
    _hf_parallel_claim: Claim | None = None
    _hf_parallel_state_saved: bool = False  # whether the training state was, in the checkpoint that is written
    _hf_parallel_saved: int = -1  # the last step of which a checkpoint was written
    _hf_parallel_is_new: bool = True  # whether the folder that is being written did not exist

    def save_for_any_layout(self, settings: CheckpointConfig) -> None:
        """Let a Trainer in one process, otherwise stock, write checkpoints that several ranks can resume."""
        self._hf_parallel_alone, self._hf_parallel_checkpoint = True, settings

    @property
    def _saves_behind(self) -> bool:
        """Whether training goes on while a checkpoint is written. Uploads need it complete, so they wait."""
        return self._checkpoint_settings.async_save and not self.args.push_to_hub and not self.args.save_only_model

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the stock Trainer does; True resumes from the newest checkpoint that is complete."""
        self._finish_saving()  # of a run before this one that ended with an error
        self._require_shared_folder()
        session, trial = self.hf_parallel_session, kwargs.get("trial", args[0] if args else None)
        if session is not None and trial is not None:
            raise UnsupportedError(
                "a trial of a hyperparameter search in a parallel run: each trial makes a second model, and the stages and shards "
                "of this rank belong to the first. Launch trials of a search as runs of their own."
            )
        if session is not None and self.model_init is not None:
            session.release()  # stock makes a new model now
        if self._hf_parallel_checkpoints:
            resume_from_checkpoint = self._begin_run(resume_from_checkpoint)
        if resume_from_checkpoint is True and self._hf_parallel_checkpoints:
            resume_from_checkpoint = self._newest_checkpoint()
        with overlooked() if self._hf_parallel_checkpoints else nullcontext():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._finish_saving()
        self._end_run()
        return output

    def _require_shared_folder(self) -> None:
        """Refuse to begin a run whose checkpoints no rank could read: one machine would not see what another writes.

        Raises:
            CheckpointError: The ranks do not share output_dir; the same text on all.
        """
        if self.hf_parallel_session is None or self.args.save_strategy == SaveStrategy.NO:
            return
        with self._waiting("waits for all ranks to look at output_dir"):
            require_shared(Path(self.args.output_dir or "."), self._hf_parallel_mesh)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, after a checkpoint that is still being written: both may use the same staging folder."""
        with self._doing("saves the model"):
            self._finish_saving()
            super().save_model(output_dir, _internal_call)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a batch; raise what went wrong with a checkpoint that is written in the background."""
        pending = self._hf_parallel_pending
        if pending is not None and pending.has_ended():
            self._finish_saving()
        return super().training_step(*args, **kwargs)

    def _load_best_model(self) -> None:
        self._finish_saving()
        super()._load_best_model()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate where all ranks agree to; list what callbacks put into a checkpoint in `on_save`."""
        self._agree_on_flags("should_log", "should_evaluate", "should_save")
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._begin_writing()
        self._save_in_memory()
        published, self._hf_parallel_published = self._hf_parallel_published, None
        if published is not None:
            with self._waiting("waits for the other ranks to list what callbacks added to the checkpoint"):
                relist(published, self._hf_parallel_mesh)

    def _save_in_memory(self) -> None:
        """Keep the step that has ended in memory, if it is due and was not saved on disk anyway."""
        step, known = self.state.global_step, self._hf_parallel_saved
        if not self._memory_due() or step == known or step >= self.state.max_steps:
            return
        with self._doing("saves a checkpoint in memory"):
            self._write_checkpoint(self.model, None, self._run_dirs[-1])

    def _begin_writing(self) -> None:
        """Start the thread that writes a checkpoint, if one is to be written."""
        ready, self._hf_parallel_ready = self._hf_parallel_ready, None
        if ready is not None and self._hf_parallel_channels is not None:
            self._hf_parallel_pending = Background(ready, self._hf_parallel_channels)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            CheckpointError: It could not be written; the same on every rank.
        """
        self._begin_writing()
        pending, self._hf_parallel_pending = self._hf_parallel_pending, None
        if pending is not None:
            with self._doing("writes a checkpoint"), self._waiting("waits for the checkpoint to be written"):
                pending.wait()

    # -- saving ----------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        if self._hf_parallel_staging is not None:
            return str(self._hf_parallel_staging)
        return super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save into a staging folder that becomes `checkpoint-N` when every rank has written its part."""
        if not self._hf_parallel_checkpoints:
            super()._save_checkpoint(model, trial)
            return
        with self._doing("saves a checkpoint"):
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: nn.Module, trial: Any, memory: Path | None = None) -> None:
        """Write a checkpoint on disk, or in a folder in memory, which has one at a time."""
        self._finish_saving()
        self._synchronise()
        self._refuse_drift()
        self._hf_parallel_saved = self.state.global_step
        run_dir = Path(super()._get_output_dir(trial)) if memory is None else memory
        staging, name = run_dir / STAGING, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        try:
            with self._together(run_dir / name, "prepare the checkpoint folder"):
                if self.args.should_save:
                    if memory is not None:
                        make_memory_folder(memory)
                    self._hf_parallel_claim = Claim(run_dir)
                    self._hf_parallel_claim.take()
                    self._hf_parallel_is_new = not os.path.lexists(run_dir / name)
                    clean(run_dir)
                    staging.mkdir(parents=True)
            self._hf_parallel_staging, self._hf_parallel_push, self._hf_parallel_state_saved = staging, False, False
            with self._together(run_dir / name, "write the checkpoint"):
                super()._save_checkpoint(model, trial)
            self._tell_of_missing_state(run_dir / name)
            self.state.best_model_checkpoint = best if memory is not None else self._best_checkpoint(run_dir, best)
            with self._together(run_dir / name, "finish the checkpoint"):
                if self.args.should_save:
                    self.state.save_to_json(str(staging / name / STATE))
                    if not self.args.save_only_model:
                        add_note(staging / name / STATE)
        except BaseException:
            self._discard(staging)
            raise
        finally:
            self._hf_parallel_staging = None
        self._hf_parallel_published = None
        self._commit(staging / name, run_dir / name, in_memory=memory is not None)
        if self._hf_parallel_push and memory is None:
            self._push_from_checkpoint(str(run_dir / name))

    def _tell_of_missing_state(self, folder: Path) -> None:
        """Say that a checkpoint holds no training state where a method of the user's passed it over; stock code says nothing."""
        wants = self.hf_parallel_session is not None and not self.args.save_only_model
        if wants and not self._hf_parallel_state_saved and self._hf_parallel_mesh.rank == 0:
            logger.warning(
                "hf_parallel: %s has weights, but no state of the optimizer, the scheduler and random numbers: a method of %s that saves did "
                "not call super()._save_optimizer_and_scheduler this time. No run can resume from it; call it, or set "
                "save_only_model to True.",
                folder,
                type(self).__name__,
            )

    def _discard(self, staging: Path) -> None:
        """Leave the run's folder to others, without what was not published; only if it was this process's."""
        claim, self._hf_parallel_claim = self._hf_parallel_claim, None
        if claim is not None and claim.is_held:
            shutil.rmtree(staging, ignore_errors=True)
            claim.release()

    def _commit(self, staged: Path, final: Path, *, in_memory: bool) -> None:
        """Publish a folder, here or in a thread that also writes the training state into it."""
        taken, self._hf_parallel_taken = self._hf_parallel_taken, None
        group = None
        if taken is not None:
            self._hf_parallel_channels = self._hf_parallel_channels or self._make_channels()
            group = self._hf_parallel_channels.saving
        finish = self._publisher(staged, final, group, in_memory=in_memory)
        if taken is None or self._hf_parallel_channels is None:
            with self._waiting("waits for the other ranks to publish the checkpoint"):
                finish()
            return
        mesh = self._hf_parallel_mesh

        def work() -> None:
            try:
                write_snapshot(staged, taken, mesh, group)
            except BaseException:
                self._discard(staged.parent)
                raise
            finish()

        self._hf_parallel_ready = work

    def _make_channels(self) -> Channels:
        mesh = self._hf_parallel_mesh
        return Channels.make(mesh.shape.world_size, mesh.timeout)

    def _publisher(
        self, staged: Path, final: Path, group: dist.ProcessGroup | None, *, in_memory: bool
    ) -> Callable[[], None]:
        """A function that brings every file to disk, lists them, and gives the folder its name; only then may older folders go."""
        mesh, state, args = self._hf_parallel_mesh, self.state, self.args
        step, best, writer = state.global_step, state.best_model_checkpoint, args.should_save
        adds, is_new = self._callbacks_add_files and group is None and not in_memory, self._hf_parallel_is_new
        limit, run = 1 if in_memory else args.save_total_limit, self._hf_parallel_run

        def finish() -> None:
            try:
                with together(mesh, final, group):
                    if writer and is_new and final.is_dir():
                        adopt(staged, final)
                files, is_open = _list_files(staged, final, mesh, adds, group)
                facts: dict[str, Any] = {}
                with together(mesh, final, group):
                    if writer:
                        facts = {"step": step, "tensors": _count(staged), **({} if run is None else {RUN: run})}
                        write_manifest(staged, files, {**facts, OPEN: True} if is_open else facts)
                        publish(staged, final)
                        rotate(final.parent, limit, final, best)
                if is_open:
                    self._hf_parallel_published = Published(final, files, facts, looks_of(final))
            finally:
                self._discard(staged.parent)

        return finish

    @property
    def _callbacks_add_files(self) -> bool:
        """Whether callbacks do something in `on_save`."""
        return any(answers(each, "on_save") for each in self.callback_handler.callbacks)

    def _best_checkpoint(self, run_dir: Path, known: str | None) -> str | None:
        """Path of the best checkpoint: the one being saved, one on disk, or what was known."""
        step = self.state.best_global_step
        folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        return str(folder) if step and (step == self.state.global_step or folder.exists()) else known

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads run in the background: start them on the final name, not on the staging folder."""
        if self._hf_parallel_staging is not None:
            self._hf_parallel_push = True
            return
        super()._push_from_checkpoint(checkpoint_folder)

    def _hf_parallel_save_state(self, output_dir: str, stock: Callable[[str], None]) -> None:
        """Write the training state, each rank its part, where stock writes the whole."""
        if not self._hf_parallel_checkpoints:
            stock(output_dir)
            return
        folder, holdings, step = Path(output_dir), self._holdings(), dropout_step(self._engine)
        self._hf_parallel_state_saved = True
        with self._waiting("waits for the other ranks to collect the training state"):
            taken = snapshot(folder, holdings, self._bare_optimizer(), step)
            scheduler = taken.groups.whole(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None
        has_scaler = getattr(self.accelerator, "scaler", None) is not None
        taken = replace(taken, description={**taken.description, "scaler": has_scaler})
        with self._together(folder, "write the training state"):
            os.makedirs(folder, exist_ok=True)
            if self.args.should_save and scheduler is not None:
                torch.save(scheduler, folder / SCHEDULER)
        if self._saves_behind:
            with self._together(folder, "copy the training state"):
                self._hf_parallel_taken = replace(taken, pieces=on_host(taken.pieces))
        else:
            with self._waiting("waits for the other ranks to write the training state"):
                write_snapshot(folder, taken, holdings.mesh)


def _list_files(
    staged: Path, final: Path, mesh: Mesh, adds: bool, group: dist.ProcessGroup | None
) -> tuple[dict[str, FileRecord], bool]:
    """All files of a folder, hashed by the ranks in turn, and whether callbacks of any rank will add some; collective."""
    with together(mesh, final, group):
        here = files_of(staged)
    # What one machine has just written another may not list yet: all ranks exchange what they see.
    listings = everyone((here, adds), group)
    names = sorted({name for here, _ in listings for name in here})
    with together(mesh, final, group):
        files = record(staged, names[mesh.rank :: mesh.shape.world_size])
    for each in everyone(files, group):
        files |= each
    return files, any(adds for _, adds in listings)


def _count(folder: Path) -> dict[str, int]:
    """Tensors of a checkpoint, for its manifest."""
    state = folder / TENSORS
    found = {"weights": len(tensor_names(folder))}
    return {**found, TENSORS: len(TensorIndex(state).tensors)} if state.is_dir() else found
