"""What TrainingArguments and a Trainer's class ask for, and a run in this layout cannot give."""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_parallel.compat.private_trackers import savers_of_model
from hf_parallel.errors import ConfigError
from hf_parallel.settings.accumulation import accumulation_for, accumulation_steps
from hf_parallel.settings.asynchronous_rules import clipped_alone, fp16_ahead, too_few
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import replica_settings
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.trainer.of_trl import problems_of
from hf_parallel.trainer.user_code import own_states


logger = logging.getLogger(__name__)


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
