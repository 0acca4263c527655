"""The way in which `memory.record` records the step of a layout: checkpoints as a run would make them, adapters, gathered blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.memory.experts import have_adapters
from hf_parallel.memory.terms import Layout, ModelShape
from hf_parallel.memory.variant import USUAL_RANK, Variant
from hf_parallel.model.stack import blocks_of
from hf_parallel.settings.sections import ActivationCheckpointingConfig


@dataclass(frozen=True)
class EachBlock:
    """Checkpoints of each block of a stack; equal ones are recorded once.

    Args:
        products: See `recompute_blocks`.
    """

    products: int | None

    def __call__(self, model: nn.Module, stack: str) -> None:
        """Let each block run again in the backward."""
        groups = [range(index, index + 1) for index in range(len(blocks_of(model, stack)))]
        recompute_blocks(model, stack, groups, products=self.products)


def checkpoint_of(how: ActivationCheckpointingConfig) -> Callable[[Any, str], object] | None:
    """Checkpoints each block of a stack by itself; None if the settings make no such blocks, or not all of them."""
    alone = how.mode == "selective" or (how.mode == "block" and how.every == 1)
    if how.every is None or how.offload or not alone:
        return None

    return EachBlock(how.products)


def variant_of(layout: Layout, adapted: ModelShape | None = None) -> Variant:
    """The way in which to record a step for `memory.estimate`.

    Memory of whole blocks that run again follows from a step without that.

    Args:
        layout: The layout of the run.
        adapted: The sizes of the model and the number of its adapters, if it is frozen and has some.
    """
    return Variant(
        checkpoint=None if layout.recompute.products is None else checkpoint_of(layout.recompute),
        gathers=layout.engine == "fsdp2" and layout.stage > 0 and layout.precision == "autocast",
        adapted=0 if adapted is None else USUAL_RANK,
        on_experts=adapted is not None and have_adapters(adapted),
    )
