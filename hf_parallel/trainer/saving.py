"""Saving of the model of a parallel Trainer: one normal Hugging Face folder with safetensors weights and no pickle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from hf_parallel.checkpoints.agree import naming_folder, together
from hf_parallel.checkpoints.folders import STAGING
from hf_parallel.checkpoints.weights.adapters import has_adapters
from hf_parallel.checkpoints.weights.write import move_files, streams
from hf_parallel.compat.private_torch import id_of_storage
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.trainer.drift import refuse_drift_of
from hf_parallel.trainer.flags import agree_on_flags
from hf_parallel.trainer.model_folder import is_whole, state_to_write, stream_model
from hf_parallel.trainer.prepared import bare_optimizer
from hf_parallel.trainer.user_code import is_users_function, overrides


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

    from hf_parallel.engine.run.engine import Engine
    from hf_parallel.engine.session import Session
    from hf_parallel.trainer.accelerator import HFParallelAccelerator

    # At run time the mixins stand before a Trainer in the order of classes; to the type checker they are one.
    Base = Trainer
else:
    Base = object


ARGUMENTS = "training_args.json"
logger = logging.get_logger(__name__)


class SavingMixin(Base):
    """Collective saving of the model; everything falls back to stock while no session is attached."""

    accelerator: HFParallelAccelerator
    model: PreTrainedModel
    _hf_parallel_said_drift: bool = False  # once a run
    _hf_parallel_alone: bool = False  # one process, whose checkpoints are to fit any layout

    @property
    def hf_parallel_session(self) -> Session | None:
        """The run's session, None for a Trainer that is not parallel."""
        return getattr(self.accelerator, "hf_parallel", None)

    @property
    def _engine(self) -> Engine | None:
        session = self.hf_parallel_session
        return session.engine if session is not None else None

    @property
    def _hf_parallel_checkpoints(self) -> bool:
        return self.hf_parallel_session is not None or self._hf_parallel_alone

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        return bare_optimizer(self.optimizer)

    @contextmanager
    def _together(self, folder: Path, what: str, *, writes: bool = True) -> Iterator[None]:
        """Around a step of saving or loading: what fails on one rank is the same CheckpointError on all."""
        waiting = self._waiting(f"waits for the other ranks to {what}")
        with waiting, together(self._hf_parallel_mesh, folder, writes=writes):
            yield

    def _agree_on_flags(self, *names: str) -> None:
        """See `agree_on_flags`."""
        if self.hf_parallel_session is not None:
            agree_on_flags(self.hf_parallel_session, self.control, self.state, *names)

    def _waiting(self, text: str) -> AbstractContextManager[None]:
        session = self.hf_parallel_session
        return nullcontext() if session is None else session.watchdog.waiting(text)

    def _doing(self, text: str, *, in_steps: bool = False) -> AbstractContextManager[None]:
        """Let the other ranks know what this one does while they wait for it."""
        session = self.hf_parallel_session
        return nullcontext() if session is None else session.watchdog.doing(text, in_steps=in_steps)

    @property
    def _hf_parallel_mesh(self) -> Mesh:
        session = self.hf_parallel_session
        return session.mesh if session is not None else Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=600))

    def _synchronise(self) -> None:
        """Make replicas that train by themselves equal, before the model is looked at."""
        if self._engine is not None:
            self._engine.gradients.replicas.synchronise()

    def _refuse_drift(self) -> None:
        """Refuse weights that the replicas changed differently; collective."""
        said = refuse_drift_of(self._engine) if self._engine is not None else ""
        if said and not self._hf_parallel_said_drift:
            self._hf_parallel_said_drift = True
            logger.warning("hf_parallel: %s", said)

    # -- weights -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as one Hugging Face folder. Each file is replaced only when complete.

        Collective, unless every rank holds the whole model: then, as under DDP, the rank that writes may call it alone.
        A `save_model` of a user's class runs, and what it calls of stock comes back to `_save`.

        Raises:
            UnsupportedError: Only some ranks called it, and each holds a part of the model or `push_to_hub` is set.
            CheckpointError: The folder cannot be written; on every rank if they write it together.
        """
        if self.hf_parallel_session is None:
            super().save_model(output_dir, _internal_call)
            return
        own = super().save_model
        if is_users_function(own):
            if not self._holds_whole(self.hf_parallel_session):
                self._prepare_saving()  # it may call `model.save_pretrained`
            own(output_dir, **({"_internal_call": True} if _internal_call else {}))
            return
        self._save_model(Path(output_dir or self.args.output_dir or "."), _internal_call)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_model(self, folder: Path, _internal_call: bool) -> None:
        session = self.hf_parallel_session
        if session is not None and not _internal_call:  # else all ranks have agreed to save
            if self._holds_whole(session) and not self.args.push_to_hub:
                self._save_whole(folder)
                return
            session.flags.meet("trainer.save_model()", reason="the ranks write the model together")
        self._prepare_saving()
        if streams(self.model) and not overrides(self, "_save"):
            engine = self.accelerator.hf_parallel_engine
            stream_model(engine, folder, self._save_rest, writes=self.args.should_save)
        else:
            state = self._state_to_write()
            with self._together(folder, "write the model"):
                if self.args.should_save:
                    self._write_folder(folder, state)

    def _prepare_saving(self) -> None:
        self.accelerator.attach_model(self.model)
        self._synchronise()
        if self._engine is not None:
            self._engine.complete_config()

    def _holds_whole(self, session: Session) -> bool:
        """Whether this rank has the whole model, before it is attached too."""
        engine = session.engine_of(self.model)
        if engine is not None:
            return is_whole(engine)
        return not session.config.keeps_parts

    def _save_whole(self, folder: Path) -> None:
        """Like `save_model`, but without the other ranks, which may be elsewhere."""
        if self.args.should_save:
            with naming_folder(self._hf_parallel_mesh, folder):
                self._write_folder(folder, self.accelerator.get_state_dict(self.model))

    def _state_to_write(self) -> dict[str, torch.Tensor]:
        """The whole state dict, of a PEFT model what it writes; on the writing rank. Collective."""
        engine = self.accelerator.hf_parallel_engine
        if is_whole(engine) or not has_adapters(self.model):
            return self.accelerator.get_state_dict(self.model)
        return state_to_write(engine)

    def _save_rest(self, folder: Path) -> None:
        """Write all but the weights, as stock."""
        self._save(str(folder), state_dict={})

    def _write_folder(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Write into a staging folder inside `folder`, then move the files over what is there, weights last."""
        staging = folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        self._save(str(staging), state_dict=state)
        move_files(staging, folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model, with the training arguments as JSON instead of a pickle."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if self.hf_parallel_session is None:
            super()._save(output_dir, state_dict)
            if self._hf_parallel_alone:
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
                (folder / ARGUMENTS).write_text(self.args.to_json_string())
            return
        own = super()._save
        if state_dict is None:  # stock's `save_model`, which one of a user's class calls on every rank
            self._save_model(folder, _internal_call=False)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if is_users_function(own):
            own(str(folder), state_dict=state_dict)
            return
        if hasattr(self.model, "save_pretrained"):
            with _no_bar_for_nothing(state_dict):
                self.model.save_pretrained(folder, state_dict=state_dict)
        else:  # a module of the user's round a model; stock writes its weights alone, too
            save_file(apart(state_dict), folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        collator = getattr(self, "data_collator", None)
        processing = getattr(self, "processing_class", None) or getattr(collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        (folder / ARGUMENTS).write_text(self.args.to_json_string())


def apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each name of a tied weight a copy of it: a file has none that share memory."""
    known: set[int] = set()
    found = {}
    for name, value in state.items():
        key = id_of_storage(value.untyped_storage())
        found[name] = value.clone() if key in known else value.contiguous()
        known.add(key)
    return found


@contextmanager
def _no_bar_for_nothing(state_dict: Any) -> Iterator[None]:
    """Without the progress bar of `save_pretrained` where weights are written by themselves."""
    if state_dict or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
