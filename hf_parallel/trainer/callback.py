"""The callback: one line in user code turns a stock Trainer into one rank of a parallel run.

It only arms in `on_init_end`. The model is cut when it is prepared (at the start of training or evaluation), reading
`model.forward` as it is then: libraries that patch the forward after the Trainer's constructor are respected.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_parallel.checkpoints.agree import raise_anywhere
from hf_parallel.checkpoints.state.lost import what_is_lost
from hf_parallel.checkpoints.weights.unread import unread_of
from hf_parallel.compat.private_transformers import calling_trainer, trainer_internals
from hf_parallel.deepspeed.trainer import (
    check_engine,
    num_parameters,
    refuse_other_runs,
    take_over,
)
from hf_parallel.engine.opening import batch_line
from hf_parallel.engine.session import Session
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.expert_parallel.plan import refuse_without_experts
from hf_parallel.memory.disk import disk_shortages
from hf_parallel.mesh.ranks import compare_settings, ranks_per_node
from hf_parallel.model.support import refuse_model
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import check_world, resolve_config
from hf_parallel.trainer.accelerator import attach_accelerator
from hf_parallel.trainer.alone import config_alone, group_for_parts, is_alone, refuse_checkpoints, stock_checkpoints
from hf_parallel.trainer.arguments import refuse_arguments, refuse_engine, set_accumulation, warn_of_draws
from hf_parallel.trainer.auto import plan_layout
from hf_parallel.trainer.compiled import with_compiled_blocks
from hf_parallel.trainer.mixin import HFParallelTrainerMixin
from hf_parallel.trainer.monitoring import MonitorCallback
from hf_parallel.trainer.of_trl import sample_of
from hf_parallel.trainer.placing import sent_by
from hf_parallel.trainer.plugin import HFParallelPlugin
from hf_parallel.trainer.prepared import bare_optimizer
from hf_parallel.trainer.restarts import refuse_memory
from hf_parallel.trainer.state_below import StateBelow
from hf_parallel.worker import prepare_engine


logger = logging.getLogger(__name__)


class HFParallelCallback(TrainerCallback):
    """Makes a stock `Trainer` parallel.

    Args:
        config: None (the YAML given to `accelerate launch`), a path, a recipe name, a mapping, an `HFParallelConfig`, or
            "auto": the layout is planned for the machines of the run, see `hf_parallel.plan`.
        sample: A small batch of the kind you train on, such as `collator([data[0], data[1]])`, for models that need more
            than text (images, cross-attention states) or take other inputs; None plans with made-up text.
        **overrides: Settings that win over `config`, such as `pp_size=2` or `num_microbatches=8`.

    Raises:
        ConfigError: All problems of the settings at once.

    Example:
        `Trainer(model=model, args=args, train_dataset=data, callbacks=[HFParallelCallback()])`
    """

    def __init__(
        self,
        config: HFParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        sample: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        self.config, self.explanation = resolve_config(config, **overrides)
        self._schedule = ScheduleChoice(self.config.pipeline, self.config.pp_size)
        prepare_engine(self.config)
        self.sample = sample
        self.session: Session | None = None
        self._armed = False
        self._driven: Trainer | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arm: find the Trainer, check everything, start the session, swap the classes of live objects."""
        trainer = calling_trainer()
        if trainer is None:
            raise UnsupportedError(
                "HFParallelCallback was called outside Trainer.__init__: pass it in Trainer(callbacks=[...])."
            )
        self._armed = True
        check_world(self.config, trainer.accelerator.num_processes)
        if self.config.zero.engine == "deepspeed" and "LOCAL_RANK" in os.environ:
            self._hand_over(trainer)
            return
        if refuse_engine(trainer, self.config):
            return
        set_accumulation(trainer, self.config)
        refuse_memory(
            self.config.checkpoint,
            dist.get_world_size() if dist.is_initialized() else 1,
            only_model=args.save_only_model,
        )
        if is_alone():
            self.config, self.explanation, acts = config_alone(self.config, self.explanation)
            if not acts:
                logger.info("hf_parallel: %s", self.explanation)
                _save_for_any_layout(trainer, self.config)
                return
        if self.config.layout == "auto":
            self._plan(trainer)
        trainer_internals()
        refuse_arguments(trainer, self.config)
        warn_of_draws(args, self.config)
        if trainer.model is not None:
            self._refuse_model(trainer.model)
        dynamo = trainer.accelerator.state.dynamo_plugin
        self.config, self._schedule = with_compiled_blocks(self.config, self._schedule, dynamo)
        group_for_parts(self.config, trainer.accelerator.device)
        session = self.session = self._start(trainer)
        attach_trainer(trainer, session)
        if session.mesh.rank == 0:
            rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
            logger.info("hf_parallel: %s", batch_line(rows, steps, session.mesh.shape.dp_size, self.config))

    def _refuse_model(self, model: nn.Module) -> None:
        refuse_model(
            *(model, self.config.model_parallel_size),
            tp_size=self.config.tp_size,
            sp_size=self.config.sp_size,
            shares_parameters=self.config.zero.shards_parameters,
        )
        refuse_without_experts(model, self.config.ep_size)
        unread = unread_of(model)
        if unread is not None:
            unread.check(self.config)

    def _start(self, trainer: Trainer) -> Session:
        session = Session.start(
            *(self.config, self._schedule, self.explanation),
            sent_by=functools.partial(sent_by, trainer, self.config, self.sample),
        )
        session.sample = self.sample or sample_of(trainer, self.config)
        if trainer.model is not None:
            session.announced = weakref.ref(trainer.model)
        return session

    def _plan(self, trainer: Trainer) -> None:
        """Take the layout that is planned for this run."""
        self.config, self.explanation = plan_layout(trainer, self.config, self.sample)
        self._schedule = ScheduleChoice(self.config.pipeline, self.config.pp_size)

    def _hand_over(self, trainer: Trainer) -> None:
        """DeepSpeed drives this run; the Trainer stays as it is."""
        refuse_other_runs(trainer, self.config)
        set_accumulation(trainer, self.config)
        take_over(trainer)
        settings = json.dumps(self.config.to_yaml_section(), sort_keys=True)
        compare_settings(settings, self.explanation)
        parameters = num_parameters(trainer)
        nodes = max(1, trainer.args.world_size // ranks_per_node())
        short = disk_shortages(parameters, self.config.zero, nodes)
        if short:
            raise ConfigError("\n".join(short))
        self._driven = trainer
        if trainer.args.process_index == 0:
            logger.info("hf_parallel: %s", self.explanation)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a callback that was added too late to act."""
        if not self._armed:
            raise ConfigError(
                "HFParallelCallback was added with add_callback() after the Trainer was made, so it has no effect. "
                "Pass it in Trainer(callbacks=[HFParallelCallback()])."
            )
        if self._driven is not None:
            line = check_engine(self._driven, self.config)
            if args.process_index == 0:
                logger.info("hf_parallel: %s", line)
        if self.session is not None and self.session.engine is not None:
            self.session.engine.gradients.replicas.plan_steps(state.max_steps, state.global_step)
            optimizer = kwargs.get("optimizer")
            if optimizer is not None and args.save_strategy != SaveStrategy.NO and not args.save_only_model:
                raise_anywhere(what_is_lost(bare_optimizer(optimizer), later=True))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave equal replicas behind."""
        if self.session is not None and self.session.engine is not None:
            self.session.engine.gradients.replicas.synchronise()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare the first batches of every epoch: each epoch shuffles anew."""
        if self.session is not None and self.session.engine is not None:
            self.session.engine.attachment.batch_check.reset()


def _save_for_any_layout(trainer: Trainer, config: HFParallelConfig) -> None:
    """Let stock training in one process write and read checkpoints that several ranks can.

    Raises:
        ConfigError: Stock code writes the checkpoints of this run, and settings of ours were given for them.
    """
    stock = stock_checkpoints(trainer)
    if stock is not None:
        refuse_checkpoints(config.checkpoint, stock)
        return
    _mix_in(trainer)
    if isinstance(trainer, HFParallelTrainerMixin):
        trainer.save_for_any_layout(config.checkpoint)


def _mix_in(trainer: Trainer) -> None:
    kind = type(trainer)
    if not issubclass(kind, HFParallelTrainerMixin):
        theirs = () if kind is Trainer else (kind,)
        trainer.__class__ = type(f"HFParallel{kind.__name__}", (HFParallelTrainerMixin, *theirs, StateBelow), {})


def attach_trainer(trainer: Trainer, session: Session) -> None:
    """Make a live Trainer, and its accelerator, parallel."""
    accelerator = trainer.accelerator
    accelerator.state.parallelism_config = HFParallelPlugin.of(session)
    attach_accelerator(accelerator, session)
    _mix_in(trainer)
    if session.config.monitor.records:
        trainer.add_callback(MonitorCallback(session, trainer.callback_handler))
    trainer.gather_function = functools.partial(
        accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
    )
