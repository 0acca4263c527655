"""A loop of one's own: `Accelerator(parallelism_config=HFParallelPlugin(...))`, and then an unchanged accelerate script."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator, ParallelismConfig

from hf_parallel.checkpoints.agree import together
from hf_parallel.compat.private_accelerate import accelerator_internals, set_axis_sizes
from hf_parallel.compat.private_transformers import calling_trainer
from hf_parallel.engine.session import Session
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.guards.stock_settings import refuse_settings
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import resolve_config
from hf_parallel.trainer.accelerator import HFParallelAccelerator, attach_accelerator
from hf_parallel.trainer.alone import config_alone, group_for_parts, is_alone
from hf_parallel.trainer.compiled import with_compiled_blocks
from hf_parallel.trainer.loop_state import load_loop_state, save_loop_state


AUTOMATIC = re.compile(r"^checkpoint_(\d+)$")


class HFParallelPlugin(ParallelismConfig):  # type: ignore[misc]
    """Settings of a parallel run as accelerate takes them.

    To accelerate, a model copy is one process: it counts replicas, whatever ranks share a copy.

    Args:
        config: None (the launcher's YAML), a path, a recipe name, a mapping, or an `HFParallelConfig`.
        sample: A small batch of the kind you train on, as the collator makes it, for models that need more than text
            (images, cross-attention states) or other inputs than a language model's; None plans with made-up text.
        total_steps: Optimizer steps of the whole run; settings that are a share of it (a warm-up of compression) need it.
        **overrides: Settings that win over `config`, such as `pp_size=2`.

    Raises:
        ConfigError: The settings are wrong, or do not fit the processes that run.
    """

    def __init__(
        self,
        config: HFParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        sample: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        **overrides: Any,
    ) -> None:
        accelerator_internals()  # renamed, `_validate_accelerator` would never run, and with it nothing of ours
        self._total_steps = total_steps
        self.config, self.explanation = resolve_config(config, **overrides)
        self._schedule = ScheduleChoice(self.config.pipeline, self.config.pp_size)
        if self.config.zero.engine == "deepspeed":
            raise UnsupportedError(
                "zero.engine=deepspeed in a loop of your own: DeepSpeed prepares model and optimizer itself. Use a Trainer, or "
                "Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=FILE)) with the FILE that `hf-parallel export --to "
                "deepspeed` writes."
            )
        if self.config.layout == "auto":
            raise UnsupportedError(
                "layout=auto in a loop of your own: its batches are not known when the Accelerator is made. Plan with `hf-parallel "
                "plan --write FILE` and give that file, or use a Trainer."
            )
        self._sample = sample
        self._session: Session | None = None
        self._of_trainer = False
        self._present(dp_size=1)

    @classmethod
    def of(cls, session: Session) -> HFParallelPlugin:
        """The plugin of a session that a Trainer has started."""
        self = cls.__new__(cls)  # the callback has resolved the settings
        self.config, self.explanation = session.config, session.explanation
        self._session, self._of_trainer = session, True
        self._present(session.mesh.shape.dp_size)
        return self

    def _present(self, dp_size: int) -> None:
        """Fill in the sizes that accelerate and the Trainer read."""
        self.dp_replicate_size, self.dp_shard_size = dp_size, 1
        # The ranks of a copy are counted as one, see `ReplicaViewMixin`.
        self.tp_size = self.cp_size = self.sp_size = 1
        self.cp_backend, self.sp_backend = "torch", "deepspeed"
        self.tp_handler = self.cp_handler = self.sp_handler = None
        set_axis_sizes(self, {"dp_replicate": dp_size, "dp_shard": 1, "tp": 1, "cp": 1, "sp": 1})

    def build_device_mesh(self, device_type: str) -> None:
        """hf_parallel has groups of its own; accelerate gets no mesh."""
        return

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Called by `Accelerator.__init__` with itself: the one place where a plugin meets its accelerator.

        Raises:
            UnsupportedError: The accelerator is a Trainer's.
        """
        if self._of_trainer:
            # Left in accelerate's shared state by an earlier Trainer with the same arguments; not meant for this one.
            accelerator.state.parallelism_config = None
            return
        if calling_trainer() is not None:
            raise UnsupportedError(
                "TrainingArguments(parallelism_config=HFParallelPlugin(...)) reaches the accelerator but not the "
                "Trainer's saving: checkpoints would hold one stage. Leave it out and pass "
                "Trainer(callbacks=[HFParallelCallback(...)]) with the same settings."
            )
        if self._session is None:
            refuse_settings(accelerator)
            if is_alone():
                self.config, self.explanation, _ = config_alone(self.config, self.explanation)
            dynamo = accelerator.state.dynamo_plugin
            self.config, self._schedule = with_compiled_blocks(self.config, self._schedule, dynamo)
            group_for_parts(self.config, accelerator.device)
            self._session = Session.start(self.config, self._schedule, self.explanation, accelerator.num_processes)
            self._session.sample = self._sample
            self._session.total_steps = self._total_steps
            self._session.raw_loop = True
            self._present(self._session.mesh.shape.dp_size)
        attach_accelerator(accelerator, self._session, RawLoopAccelerator)


class RawLoopAccelerator(HFParallelAccelerator):
    """Adds what a loop calls and a Trainer does not: saving and loading its state, and letting go of a model."""

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save the state of a loop into a folder that any layout can load; collective.

        Weights, optimizers, schedulers, loss scale, random states, objects registered with `register_for_checkpointing` and
        the states of stateful loaders are written; the folder counts only when all of it is there.

        Raises:
            UnsupportedError: Only some ranks called it.
            CheckpointError: Something cannot be written; the same on every rank.
            RankMismatchError: Replicas have different weights; on every rank.
        """
        self.hf_parallel.meeting.meet("accelerator.save_state()")
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            folder = Path(str(self.project_dir), "checkpoints", f"checkpoint_{project.iteration}")
        elif output_dir is None:
            raise ConfigError(
                "accelerator.save_state() has no folder. Pass output_dir, or set automatic_checkpoint_naming."
            )
        else:
            folder = Path(output_dir).expanduser()
        save_loop_state(self, folder, replaces=not project.automatic_checkpoint_naming)
        if project.automatic_checkpoint_naming and project.total_limit is not None:
            with together(self.hf_parallel.mesh, folder):
                for _, old in _numbered(folder.parent)[: -project.total_limit] if self.is_main_process else ():
                    shutil.rmtree(old)
        project.iteration += 1
        return str(folder)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Any = None, **options: Any
    ) -> None:
        """Load what `save_state` wrote under any layout; collective.

        Raises:
            UnsupportedError: Only some ranks called it.
            CheckpointError: The folder is incomplete, damaged, or of another run; the same on every rank.
        """
        self.hf_parallel.meeting.meet("accelerator.load_state()")
        if input_dir is None:
            found = _numbered(Path(str(self.project_dir), "checkpoints"))
            if not self.project_configuration.automatic_checkpoint_naming or not found:
                raise ConfigError("accelerator.load_state() has no folder: there is none to pick. Pass input_dir.")
            input_dir = found[-1][1]
        load_loop_state(self, Path(input_dir).expanduser())

    def wait_for_everyone(self) -> None:
        """Wait for all processes; then replicas compare what the last update has left: no step follows that would.

        Raises:
            RankMismatchError: It differs.
        """
        super().wait_for_everyone()
        engine = self.hf_parallel.engine
        if engine is not None:
            engine.gradients.compare_replicas()

    def free_memory(self, *objects: Any) -> Any:
        """Let go of the model and of `objects`; another model may be prepared afterwards, or the same one again."""
        self.hf_parallel.release()
        return super().free_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Folders that were named by number, the oldest first."""
    found = [(AUTOMATIC.match(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match is not None and path.is_dir())
