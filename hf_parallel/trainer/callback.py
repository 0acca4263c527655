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
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_parallel.checkpoints.agree import raise_anywhere
from hf_parallel.checkpoints.state.lost import what_is_lost
from hf_parallel.checkpoints.weights.unread import unread_of
from hf_parallel.compat.private_trackers import savers_of_model
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
from hf_parallel.settings.accumulation import accumulation_for, accumulation_steps
from hf_parallel.settings.asynchronous_rules import clipped_alone, fp16_ahead, too_few
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import check_world, resolve_config
from hf_parallel.settings.recipes import replica_settings
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.trainer.accelerator import attach_accelerator
from hf_parallel.trainer.alone import config_alone, group_for_parts, is_alone, refuse_checkpoints, stock_checkpoints
from hf_parallel.trainer.auto import plan_layout
from hf_parallel.trainer.compiled import with_compiled_blocks
from hf_parallel.trainer.mixin import HFParallelTrainerMixin
from hf_parallel.trainer.monitoring import MonitorCallback
from hf_parallel.trainer.of_trl import problems_of, sample_of
from hf_parallel.trainer.placing import sent_by
from hf_parallel.trainer.plugin import HFParallelPlugin
from hf_parallel.trainer.prepared import bare_optimizer
from hf_parallel.trainer.restarts import refuse_memory
from hf_parallel.trainer.state_below import StateBelow
from hf_parallel.trainer.user_code import own_states
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


def set_accumulation(trainer: Trainer, config: HFParallelConfig) -> None:
    """Give the Trainer the number of batches of an optimizer step that the settings say, if they say one.

    Raises:
        ConfigError: TrainingArguments say another.
    """
    args, wanted = trainer.args, config.gradient_accumulation_steps
    if config.global_batch_size is None:
        steps = accumulation_steps(wanted, args.gradient_accumulation_steps, "TrainingArguments")
    else:
        if trainer.accelerator.split_batches:
            raise ConfigError(
                f"global_batch_size={config.global_batch_size} with split_batches=True: two settings would say how many rows a batch "
                "has. Set split_batches of accelerator_config to False."
            )
        replicas = config.dp_size(dist.get_world_size() if dist.is_initialized() else 1)
        rows = args.per_device_train_batch_size
        steps = accumulation_for(config.global_batch_size, rows, replicas, args.gradient_accumulation_steps)
    if steps != args.gradient_accumulation_steps:
        args.gradient_accumulation_steps = steps
        logger.info("hf_parallel: gradient_accumulation_steps=%d, from the settings.", steps)


def refuse_engine(trainer: Trainer, config: HFParallelConfig) -> bool:
    """Whether DeepSpeed or FSDP drives this run and hf_parallel stays out of it.

    Raises:
        ConfigError: It does, but tp or pp were asked for.
    """
    name = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP" if trainer.is_fsdp_enabled else None
    if name is None:
        return False
    if config.model_parallel_size > 1:
        raise ConfigError(
            f"distributed_type {name} together with pp_size={config.pp_size}, tp_size={config.tp_size}: both would "
            "own the model. Set distributed_type: MULTI_GPU, or pp_size and tp_size to 1."
        )
    unread = replica_settings(config)
    if unread:
        instead = (
            "use zero_optimization.stage, zero_quantized_gradients or communication_data_type of its own config"
            if name == "DeepSpeed"
            else "call hf_parallel.data_parallel.compression.fsdp2.compress_fsdp2 in a loop of your own"
        )
        raise ConfigError(
            f"{', '.join(unread)} with distributed_type {name}, which drives "
            f"the run itself: it would have no effect. Set distributed_type: MULTI_GPU, or {instead}."
        )
    logger.info("hf_parallel: %s drives this run; hf_parallel changes nothing.", name)
    return True


def warn_of_draws(args: TrainingArguments, config: HFParallelConfig) -> None:
    """Say that noise on embeddings, as dropout, is drawn from other streams than in one process."""
    if args.neftune_noise_alpha is None or args.process_index != 0:
        return
    if config.pp_size > 1:
        where, why = (
            f"pp_size={config.pp_size}",
            "that of each microbatch is drawn from a stream of its own, like dropout",
        )
    elif config.tp_size > 1 and config.tensor_parallel.sequence_parallel:
        where, why = (
            "sequence_parallel: true",
            "each block takes a number of the stream that it is drawn from, for its dropout",
        )
    else:
        return
    logger.warning(
        "hf_parallel: neftune_noise_alpha=%s with %s: %s. It has the size that it has in one process, from other random numbers, so "
        "that losses differ by it.",
        args.neftune_noise_alpha,
        where,
        why,
    )


def _without_effect(args: TrainingArguments) -> list[str]:
    found = []
    if args.ddp_bucket_cap_mb is not None:
        found.append(
            f"ddp_bucket_cap_mb={args.ddp_bucket_cap_mb} has no effect: there is no DDP to read it. Leave it unset and set "
            "data_parallel.bucket_cap_mb of the hf_parallel settings."
        )
    return found


def _asynchronous(args: TrainingArguments, config: HFParallelConfig) -> list[str]:
    """Problems of a Trainer's arguments with a schedule that does not drain the pipeline, one a line; none with others."""
    name, found = config.pipeline.schedule, []
    if name not in ASYNCHRONOUS:
        return []
    batches = args.gradient_accumulation_steps
    found += fp16_ahead(name, "fp16" if args.fp16 else "no", "fp16=True", "bf16=True")
    found += clipped_alone(config.pipeline, args.max_grad_norm or 0.0)
    if name == "pipedream" and batches > 1:
        found.append(
            f"gradient_accumulation_steps={batches} with pipeline.schedule=pipedream: it updates the weights after every microbatch. "
            "Set gradient_accumulation_steps to 1, or pipeline.schedule to pipedream_2bw."
        )
    if name == "pipedream_2bw":
        rows = args.per_device_train_batch_size
        parts = min(rows, config.pipeline.parts_of_batch(config.pp_size))
        found += too_few(parts * batches, config.pp_size)
    return found


def _not_called(trainer: Trainer) -> list[str]:
    """Problems of methods of users that save or load training state, one a line."""
    if trainer.args.save_strategy == SaveStrategy.NO:
        return []
    return [
        f"{type(trainer).__name__}.{name} does not call super().{name}: each rank saves and loads its part of the training state "
        "there. Call it, do the same in TrainerCallback.on_save or _save_checkpoint, or set save_strategy to no."
        for name in own_states(trainer)
    ]


def _saved_by_trackers(trainer: Trainer, config: HFParallelConfig) -> list[str]:
    """Problems of trackers that save the model on the main process alone, one a line."""
    has_parts = config.weight_parts > 1 or config.ep_size > 1 or config.zero.shards_parameters
    if not has_parts and config.local_sgd.sync_every == 1:
        return []
    return [
        f"{setting} with {config.sizes_text}, zero.stage={config.zero.stage}: when training ends, rank 0 alone would save the model for "
        "the tracker and wait for the other ranks, which hold the rest of it. Leave it out; call trainer.save_model(folder) on every rank "
        "after trainer.train(), and log the folder as an artifact on rank 0."
        for setting in savers_of_model(trainer)
    ]


def refuse_arguments(trainer: Trainer, config: HFParallelConfig) -> None:
    """Refuse Trainer settings that would have no effect or a wrong one; all at once.

    Raises:
        ConfigError: Every problem with its fix, one a line.
    """
    args, problems = trainer.args, [*_without_effect(trainer.args), *problems_of(trainer, config)]
    sizes = {"pp_size": config.pp_size, "tp_size": config.tp_size, "sp_size": config.sp_size}
    shared = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if args.auto_find_batch_size:
        problems.append("auto_find_batch_size=True is not available: it retries on one rank only. Set a batch size.")
    if args.use_liger_kernel and config.model_parallel_size > 1:
        problems.append(
            f"use_liger_kernel=True with {shared}: it replaces the loss, and reads the whole head and whole rows. Set it to False."
        )
    if (args.bf16_full_eval or args.fp16_full_eval) and config.pp_size > 1:
        problems.append(
            f"bf16_full_eval or fp16_full_eval=True with pp_size={config.pp_size}: the cut keeps the dtypes it was made "
            "with, and this casts the model afterwards. Leave them False; bf16=True autocasts evaluation too."
        )
    if (args.bf16_full_eval or args.fp16_full_eval) and config.zero.stage == 3:
        problems.append(
            "bf16_full_eval or fp16_full_eval=True with zero.stage 3: ranks gather their parts in the dtype the model was prepared "
            "in, and this casts the parts afterwards. Leave them False; bf16=True autocasts evaluation too."
        )
    problems += [*_asynchronous(args, config), *_not_called(trainer), *_saved_by_trackers(trainer, config)]
    if args.n_gpu > 1:
        problems.append(f"{args.n_gpu} GPUs in one process (DataParallel). Launch one process a GPU.")
    if args.eval_use_gather_object:
        problems.append("eval_use_gather_object=True is not available. Return tensors from the model.")
    if args.save_on_each_node:
        problems.append(
            "save_on_each_node=True is not available: one rank writes the model. Leave it False, with an output_dir that all "
            "nodes share."
        )
    if trainer.accelerator.dispatch_batches and config.model_parallel_size > 1:
        problems.append(
            f"accelerator_config.dispatch_batches=True with {shared}: the ranks of a model copy read the same rows, and this "
            "gives every rank other ones. Leave it unset."
        )
    if not isinstance(trainer.model, nn.Module):
        problems.append("the model is not a torch.nn.Module.")
    data = trainer.train_dataset
    if data is not None and not isinstance(data, IterableDataset) and hasattr(data, "__len__") and len(data) == 0:
        problems.append("train_dataset is empty: there is nothing to train on.")
    if problems:
        raise ConfigError("\n".join(problems))
