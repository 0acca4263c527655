"""Recomputation for `memory.record`: checkpoints a recorded model as a run would, where every block is a checkpoint of its own."""

from __future__ import annotations

from torch import nn

from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.memory.record import Checkpoint
from hf_parallel.model.stack import blocks_of
from hf_parallel.settings.sections import ActivationCheckpointingConfig


def checkpoint_of(how: ActivationCheckpointingConfig) -> Checkpoint | None:
    """Checkpoints each block of a stack by itself; None if the settings make no such blocks, or not all of them."""
    alone = how.mode == "selective" or (how.mode == "block" and how.every == 1)
    if how.every is None or how.offload or not alone:
        return None

    def apply(model: nn.Module, stack: str) -> None:
        groups = [range(index, index + 1) for index in range(len(blocks_of(model, stack)))]
        recompute_blocks(model, stack, groups, products=how.products)

    return apply
