"""A Trainer or a loop in one process: which settings act there, and the process group that some need."""

from __future__ import annotations

import atexit

import torch
import torch.distributed as dist

from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.one_process import in_one_process


def is_alone() -> bool:
    """Whether this process is the only one of its run; a launcher may have made a group of it."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def config_alone(config: HFParallelConfig, explanation: str) -> tuple[HFParallelConfig, str, bool]:
    """The settings of one process.

    Args:
        config: As given.
        explanation: Where they came from.

    Returns:
        The settings that have an effect, `explanation` with both kinds named, and whether the engine has to run for them.

    Raises:
        ConfigError: Something cannot be had in one process.
    """
    alone = in_one_process(config)
    return alone.config, f"{explanation}{alone.words}", bool(alone.acting)


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
