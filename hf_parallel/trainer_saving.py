"""Saving and resuming of a parallel Trainer.

The export is one normal Hugging Face folder with safetensors weights and no pickle. A checkpoint is made in a staging
folder and renamed when all ranks have finished writing: at any moment `checkpoint-N` is complete or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_parallel.checkpoint import load_weights, publish
from hf_parallel.errors import CheckpointError
from hf_parallel.loading.together import raise_anywhere
from hf_parallel.loading.write import move_in, plan_export, streams, write_weights
from hf_parallel.pipeline_engine import PipelineEngine
from hf_parallel.training_state import load_training_state, save_training_state


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

    from hf_parallel.accelerator import HFParallelAccelerator
    from hf_parallel.engine import Engine
    from hf_parallel.session import Session

    # At run time the mixins stand before a Trainer in the order of classes; to the type checker they are one.
    Base = Trainer
else:
    Base = object


STAGING = ".incomplete"
SCHEDULER = "scheduler.pt"
PIPELINE = "pipeline_state.json"
ARGUMENTS = "training_args.json"


class SavingMixin(Base):
    """Collective saving and loading; everything falls back to stock while no session is attached."""

    accelerator: HFParallelAccelerator
    model: PreTrainedModel
    _hf_parallel_staging: Path | None = None
    _hf_parallel_push: bool = False

    @property
    def hf_parallel_session(self) -> Session | None:
        """The run's session, None for a Trainer that is not parallel."""
        return getattr(self.accelerator, "hf_parallel", None)

    @property
    def _engine(self) -> Engine | None:
        session = self.hf_parallel_session
        return session.engine if session is not None else None

    def _barrier(self, what: str) -> None:
        session = self.hf_parallel_session
        if session is not None and dist.is_initialized():
            with session.watchdog.waiting(f"waits for the other ranks to {what}"):
                dist.barrier()

    def _synchronise(self) -> None:
        """Replicas that train by themselves become equal before the model is looked at."""
        if self._engine is not None:
            self._engine.gradients.replicas.synchronise()

    # -- weights -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as one Hugging Face folder; collective. Each file is replaced only when complete."""
        if self.hf_parallel_session is None:
            super().save_model(output_dir, _internal_call)
            return
        self.accelerator.attach_model(self.model)
        self._synchronise()
        folder = Path(output_dir or self.args.output_dir or ".")
        if streams(self.model):
            self._stream_folder(folder)
        else:
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._write_folder(folder, state)
        self._barrier("write the model")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _stream_folder(self, folder: Path) -> None:
        """Everything but weights as stock, the weights one by one, into a staging folder inside `folder`; collective."""
        attachment = self.accelerator.hf_parallel_engine.attachment
        staging = folder / STAGING
        export, problem = plan_export(self.model, attachment.ledger), None
        try:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
                self._save(str(staging), state_dict={})
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
        raise_anywhere(problem)
        held = {**attachment.parameters, **attachment.buffers}
        into = staging if self.args.should_save else None
        mesh, watchdog = attachment.mesh, attachment.watchdog
        write_weights(export, into, self.model, attachment.ledger, held, mesh, watchdog)
        if self.args.should_save:
            move_in(staging, folder, export)

    def _write_folder(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Write into a staging folder inside `folder`, then move the files over what is there, weights last."""
        staging = folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        self._save(str(staging), state_dict=state)
        files = sorted(staging.iterdir(), key=lambda path: path.name.startswith("model"))
        for path in files:
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        staging.rmdir()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As stock, with the training arguments as JSON instead of a pickle."""
        if self.hf_parallel_session is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder, state_dict=state_dict)
        collator = getattr(self, "data_collator", None)
        processing = getattr(self, "processing_class", None) or getattr(collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        (folder / ARGUMENTS).write_text(self.args.to_json_string())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.hf_parallel_session is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self.accelerator.attach_model(self.model)
        self._load_held(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.hf_parallel_session is None:
            super()._load_best_model()
            return
        self._load_held(str(self.state.best_model_checkpoint))

    def _load_held(self, folder: str) -> None:
        attachment = self.accelerator.hf_parallel_engine.attachment
        held = {**attachment.parameters, **attachment.buffers}
        load_weights(folder, attachment.ledger, held, attachment.mesh)
        attachment.gradients.replicas.reloaded()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        if self._hf_parallel_staging is not None:
            return str(self._hf_parallel_staging)
        return super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As stock, into a staging folder that becomes `checkpoint-N` when every rank has written its part."""
        if self.hf_parallel_session is None:
            super()._save_checkpoint(model, trial)
            return
        self._synchronise()
        run_dir = Path(super()._get_output_dir(trial))
        staging, name = run_dir / STAGING, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self._barrier("prepare the checkpoint folder")
        best = self.state.best_model_checkpoint
        self._hf_parallel_staging, self._hf_parallel_push = staging, False
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._hf_parallel_staging = None
        self.state.best_model_checkpoint = self._best_checkpoint(run_dir, best)
        self._barrier("write the checkpoint")
        if self.args.should_save:
            self.state.save_to_json(str(staging / name / "trainer_state.json"))
            publish(staging / name, run_dir / name)
            staging.rmdir()
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self._barrier("publish the checkpoint")
        if self._hf_parallel_push:
            self._push_from_checkpoint(str(run_dir / name))

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
        session, engine = self.hf_parallel_session, self._engine
        if session is None or engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        os.makedirs(output_dir, exist_ok=True)
        optimizer, attachment = self._bare_optimizer(), engine.attachment
        with session.watchdog.waiting("waits for the optimizer state of the other replicas"):
            save_training_state(output_dir, optimizer, attachment.gradients.replicas, attachment.parameters, session)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))
        if self.args.should_save and isinstance(engine, PipelineEngine):
            Path(output_dir, PIPELINE).write_text(json.dumps({"dropout_step": engine.seeds.step}))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        session, engine = self.hf_parallel_session, self._engine
        if session is None or engine is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if checkpoint is None:
            return
        optimizer, attachment = self._bare_optimizer(), engine.attachment
        load_training_state(checkpoint, optimizer, attachment.gradients.replicas, attachment.parameters, session)
        if self.lr_scheduler is not None:
            path = Path(checkpoint, SCHEDULER)
            if not path.is_file():
                raise CheckpointError(f"{path} does not exist: the checkpoint is incomplete. Resume from another one.")
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))
        state = Path(checkpoint, PIPELINE)
        if isinstance(engine, PipelineEngine) and state.is_file():  # absent: saved by another layout, without stages
            engine.seeds.step = int(json.loads(state.read_text())["dropout_step"])

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer
