"""Checkpoints of a parallel Trainer: made aside, published at one point, resumed under any layout.

The export of the model is the model part of a checkpoint, so that weights are written once and stock code reads them;
what else training carries is in pieces beside it (see `state`). A process that trains alone writes the same, so
that it may go on as several ranks, and the other way round.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_parallel.adapters import has_adapters, load_adapters
from hf_parallel.checkpointing.agree import everyone, together
from hf_parallel.checkpointing.background import Background, Channels, on_host
from hf_parallel.checkpointing.dcp import TensorIndex
from hf_parallel.checkpointing.folders import (
    MANIFEST,
    STAGING,
    clean,
    files_of,
    newest,
    publish,
    record,
    rotate,
    verify,
    write_manifest,
)
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import build_ledger
from hf_parallel.loading.converted import conversion_of
from hf_parallel.mesh import MeshShape
from hf_parallel.pipeline_engine import PipelineEngine
from hf_parallel.training.saving import SavingMixin
from hf_parallel.training.state import (
    DESCRIPTION,
    TENSORS,
    Holdings,
    Snapshot,
    load_training_state,
    read_description,
    rng_source,
    snapshot,
    write_snapshot,
)
from hf_parallel.weights import check_config, load_weights, tensor_names


logger = logging.getLogger(__name__)

SCHEDULER = "scheduler.pt"
OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")  # lists of a scheduler with one entry a parameter group


class CheckpointMixin(SavingMixin):
    """Checkpoints by all ranks; everything falls back to stock for a Trainer that hf_parallel does not drive."""

    _hf_parallel_staging: Path | None = None
    _hf_parallel_push: bool = False
    _hf_parallel_alone: bool = False  # one process, whose checkpoints are to fit any layout
    _hf_parallel_async: bool = False
    _hf_parallel_taken: Snapshot | None = None  # of the save that is being made, if it is written in the background
    _hf_parallel_pending: Background | None = None
    _hf_parallel_channels: Channels | None = None

    @property
    def _hf_parallel_checkpoints(self) -> bool:
        return self.hf_parallel_session is not None or self._hf_parallel_alone

    def save_for_any_layout(self, async_save: bool) -> None:
        """Let a Trainer in one process, otherwise stock, write checkpoints that several ranks can resume."""
        self._hf_parallel_alone, self._hf_parallel_async = True, async_save

    @property
    def _saves_behind(self) -> bool:
        """Whether training goes on while a checkpoint is written. Uploads need it complete, so they wait."""
        session = self.hf_parallel_session
        wanted = self._hf_parallel_async if session is None else session.config.checkpoint.async_save
        return wanted and not self.args.push_to_hub and not self.args.save_only_model

    def _holdings(self) -> Holdings:
        """What this rank has of the run; the model is parallelized if it was not yet."""
        session = self.hf_parallel_session
        if session is None:
            return self._held_alone()
        engine = self.accelerator.attach_model(self.model)
        attachment, config = engine.attachment, session.config
        replicas = attachment.gradients.replicas
        settings = config.gradient_compression if replicas.local is None else config.local_sgd.compression
        held = attachment.parameters, attachment.buffers
        return Holdings(attachment.ledger, attachment.mesh, *held, replicas, settings)

    def _held_alone(self) -> Holdings:
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        ledger = build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs={})
        named = dict(model.named_parameters(remove_duplicate=False))
        parameters = {entry.name: named[entry.name] for entry in ledger if entry.kind == "param"}
        others = dict(model.named_buffers(remove_duplicate=False))
        buffers = {entry.name: others[entry.name] for entry in ledger if entry.kind == "buffer"}
        return Holdings(ledger, self._hf_parallel_mesh, parameters, buffers)

    # -- resuming --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As stock; True resumes from the newest checkpoint that is complete."""
        self._finish_saving()  # of a run before this one that ended with an error
        session, trial = self.hf_parallel_session, kwargs.get("trial", args[0] if args else None)
        if session is not None and self.model_init is not None and trial is None:
            session.release()  # stock makes a new model now
        if resume_from_checkpoint is True and self._hf_parallel_checkpoints:
            resume_from_checkpoint = self._newest_checkpoint()
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._finish_saving()
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As stock; a checkpoint that is being written comes first: both may use the same staging folder."""
        self._finish_saving()
        super().save_model(output_dir, _internal_call)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock; raises what went wrong with a checkpoint that is written meanwhile."""
        pending = self._hf_parallel_pending
        if pending is not None and pending.has_ended():
            self._finish_saving()
        return super().training_step(*args, **kwargs)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            CheckpointError: It could not be written; the same on every rank.
        """
        pending, self._hf_parallel_pending = self._hf_parallel_pending, None
        if pending is not None:
            with self._waiting("waits for the checkpoint to be written"):
                pending.wait()

    def _newest_checkpoint(self) -> str:
        """Path of the newest complete checkpoint, the same on every rank; what killed saves left is removed.

        Raises:
            CheckpointError: There is none.
        """
        run_dir, found = Path(self.args.output_dir or "."), [""]
        with self._together(run_dir, "find a checkpoint", writes=False):
            if self._hf_parallel_mesh.rank == 0:
                clean(run_dir)
                path, passed = newest(run_dir)
                for reason in passed:
                    logger.warning("hf_parallel: passed over an incomplete checkpoint: %s.", reason)
                if path is None:
                    raise CheckpointError(
                        f"{run_dir} has no complete checkpoint to resume from. Start without resuming."
                    )
                found = [str(path)]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not self._reads(folder):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        holdings = self._holdings()
        mesh = holdings.mesh
        with self._together(folder, "check the checkpoint", writes=False):
            verify(folder, mesh.rank, mesh.shape.world_size)
            check_config(folder, self.model.config)
        self._load_held(folder, holdings)

    def _load_best_model(self) -> None:
        self._finish_saving()
        folder = Path(str(self.state.best_model_checkpoint))
        if not self._reads(folder):
            super()._load_best_model()
            return
        self._load_held(folder, self._holdings())

    def _reads(self, folder: Path) -> bool:
        """Whether weights are read here: one process leaves what the stock Trainer wrote to stock code."""
        return self._hf_parallel_checkpoints and not (self._hf_parallel_alone and not (folder / MANIFEST).is_file())

    def _load_held(self, folder: Path, holdings: Holdings) -> None:
        """Read this rank's parameters and buffers."""
        model = self.accelerator.unwrap_model(self.model)
        with self._together(folder, "read the weights", writes=False):
            if has_adapters(model):
                load_adapters(folder, model)
            else:
                converted = conversion_of(folder, model)
                load_weights(folder, holdings.ledger, holdings.tensors, holdings.mesh, converted=converted)
        if holdings.replicas is not None:
            holdings.replicas.reloaded()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not self._hf_parallel_checkpoints or (self._hf_parallel_alone and not (folder / DESCRIPTION).is_file()):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        holdings = self._holdings()
        with self._together(folder, "read the training state", writes=False):
            resumed = load_training_state(folder, holdings, self._bare_optimizer())
            self._load_scheduler(folder / SCHEDULER, resumed.order)
        if isinstance(self._engine, PipelineEngine) and resumed.dropout_step is not None:
            self._engine.seeds.step = resumed.dropout_step

    def _load_scheduler(self, path: Path, order: list[int]) -> None:
        if self.lr_scheduler is None:
            return
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: the checkpoint is incomplete. Resume from another one.")
        state = torch.load(path, weights_only=True)
        for key in OF_GROUPS:
            if isinstance(state.get(key), list) and len(state[key]) == len(order):
                state[key] = [state[key][index] for index in order]
        self.lr_scheduler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As stock in the layout it was saved under; else all ranks of a model copy take the state of a saved copy."""
        if not self._hf_parallel_checkpoints or checkpoint is None or not Path(checkpoint, DESCRIPTION).is_file():
            super()._load_rng_state(checkpoint)
            return
        saved = MeshShape(**read_description(Path(checkpoint))["mesh"])
        source = Path(checkpoint, _rng_file(rng_source(saved, self._hf_parallel_mesh), saved.world_size))
        with tempfile.TemporaryDirectory() as folder:
            # Stock code looks for a file with this rank's number.
            link = Path(folder, _rng_file(self.args.process_index, self.args.world_size))
            link.symlink_to(source.resolve())
            super()._load_rng_state(folder)

    # -- saving ----------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        if self._hf_parallel_staging is not None:
            return str(self._hf_parallel_staging)
        return super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As stock, into a staging folder that becomes `checkpoint-N` when every rank has written its part."""
        if not self._hf_parallel_checkpoints:
            super()._save_checkpoint(model, trial)
            return
        self._finish_saving()
        self._synchronise()
        run_dir = Path(super()._get_output_dir(trial))
        staging, name = run_dir / STAGING, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        try:
            with self._together(run_dir / name, "prepare the checkpoint folder"):
                if self.args.should_save:
                    clean(run_dir)
                    staging.mkdir(parents=True)
            self._hf_parallel_staging, self._hf_parallel_push = staging, False
            with self._together(run_dir / name, "write the checkpoint"):
                super()._save_checkpoint(model, trial)
            self.state.best_model_checkpoint = self._best_checkpoint(run_dir, best)
            with self._together(run_dir / name, "finish the checkpoint"):
                if self.args.should_save:
                    self.state.save_to_json(str(staging / name / "trainer_state.json"))
        except BaseException:
            self._discard(staging)
            raise
        finally:
            self._hf_parallel_staging = None
        self._commit(staging / name, run_dir / name)
        if self._hf_parallel_push:
            self._push_from_checkpoint(str(run_dir / name))

    def _discard(self, staging: Path) -> None:
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)

    def _commit(self, staged: Path, final: Path) -> None:
        """Publish a folder, here or in a thread that also writes the training state into it."""
        taken, self._hf_parallel_taken = self._hf_parallel_taken, None
        group = None
        if taken is not None:
            self._hf_parallel_channels = self._hf_parallel_channels or self._make_channels()
            group = self._hf_parallel_channels.saving
        finish = self._publisher(staged, final, group)
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

        self._hf_parallel_pending = Background(work, self._hf_parallel_channels)

    def _make_channels(self) -> Channels:
        mesh = self._hf_parallel_mesh
        return Channels.make(mesh.shape.world_size, mesh.timeout)

    def _publisher(self, staged: Path, final: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """What brings every file to disk, lists them, and gives the folder its name; only then may older ones go."""
        mesh, state, args = self._hf_parallel_mesh, self.state, self.args
        step, best, writer = state.global_step, state.best_model_checkpoint, args.should_save

        def finish() -> None:
            try:
                with together(mesh, final, group):
                    files = record(staged, files_of(staged)[mesh.rank :: mesh.shape.world_size])
                for each in everyone(files, group):
                    files |= each
                with together(mesh, final, group):
                    if writer:
                        write_manifest(staged, files, {"step": step, "tensors": _count(staged)})
                        publish(staged, final)
                        rotate(final.parent, args.save_total_limit, final, best)
            finally:
                self._discard(staged.parent)

        return finish

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

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._hf_parallel_checkpoints:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder, holdings, engine = Path(output_dir), self._holdings(), self._engine
        step = engine.seeds.step if isinstance(engine, PipelineEngine) else None
        with self._waiting("waits for the other ranks to collect the training state"):
            taken = snapshot(folder, holdings, self._bare_optimizer(), step)
        with self._together(folder, "write the training state"):
            os.makedirs(folder, exist_ok=True)
            if self.args.should_save and self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
        if self._saves_behind:
            with self._together(folder, "copy the training state"):
                self._hf_parallel_taken = replace(taken, pieces=on_host(taken.pieces))
        else:
            with self._waiting("waits for the other ranks to write the training state"):
                write_snapshot(folder, taken, holdings.mesh)

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer


def _rng_file(rank: int, world_size: int) -> str:
    return "rng_state.pth" if world_size <= 1 else f"rng_state_{rank}.pth"


def _count(folder: Path) -> dict[str, int]:
    """Tensors of a checkpoint, for its manifest."""
    state = folder / TENSORS
    found = {"weights": len(tensor_names(folder))}
    return {**found, TENSORS: len(TensorIndex(state).tensors)} if state.is_dir() else found
