"""A Trainer or a loop in one process: which settings act there, and the process group that some need."""

from __future__ import annotations

import atexit

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.one_process import in_one_process
from hf_parallel.settings.sections import CheckpointConfig
from hf_parallel.settings.values import spelled
from hf_parallel.trainer.user_code import own_states


def is_alone() -> bool:
    """Whether this process is the only one of its run; a launcher may have made a group of it."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def config_alone(config: HFParallelConfig, explanation: str) -> tuple[HFParallelConfig, str, bool]:
    """The settings of one process.

    Args:
        config: Settings as they were given.
        explanation: Origin of the settings.

    Returns:
        The settings that have an effect, `explanation` with both kinds named, and whether the engine has to run for them.

    Raises:
        ConfigError: Something cannot be had in one process.
    """
    alone = in_one_process(config)
    return alone.config, f"{explanation}{alone.words}", bool(alone.acting)


def stock_checkpoints(trainer: Trainer) -> str | None:
    """Why stock code writes the checkpoints of a Trainer in one process; None: they are written for any layout."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return f"{'DeepSpeed' if trainer.is_deepspeed_enabled else 'FSDP'} drives this run"
    if trainer.args.n_gpu > 1:
        return f"one process drives {trainer.args.n_gpu} GPUs (DataParallel); launch one process a GPU"
    if not isinstance(trainer.model, nn.Module):
        return "the model is not a torch.nn.Module"
    methods_of_state = own_states(trainer)
    if methods_of_state:
        return f"{type(trainer).__name__} has a {methods_of_state[0]} of its own, which does not call that of Trainer"
    # What other methods of PEFT save may be made of what they train: stock code takes it up.
    methods = {
        str(config.peft_type).rpartition(".")[2] for config in getattr(trainer.model, "peft_config", {}).values()
    }
    others = sorted(methods - {"LORA"})
    return f"the model has adapters of other methods than LoRA ({', '.join(others)})" if others else None


def refuse_checkpoints(settings: CheckpointConfig, why: str) -> None:
    """Refuse what is set for checkpoints that stock code writes.

    Raises:
        ConfigError: Such a setting is not the default.
    """
    given = {name: value for name, value in settings.model_dump(exclude_defaults=True).items() if value}
    if given:
        named = ", ".join(f"checkpoint.{name}={spelled(value)}" for name, value in given.items())
        raise ConfigError(
            f"{named} would have no effect in one process: {why}. Stock code writes its checkpoints. Leave the setting out."
        )


def group_for_parts(config: HFParallelConfig, device: torch.device) -> None:
    """Make the default group of a process that nobody launched and that offloads: parts of ZeRO belong to a group.

    NCCL opens nothing before its first message.
    """
    if not config.zero.offloads or dist.is_initialized():
        return
    on_gpu = device.type == "cuda" and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(_close)


def _close() -> None:
    """NCCL warns where a process ends with its group."""
    if dist.is_initialized():
        dist.destroy_process_group()
