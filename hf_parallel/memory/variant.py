"""The ways in which a step of a model is recorded. Without torch, as whoever asks for them may have none yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Variant:
    """A way in which a step is recorded, beside the precision of its parameters.

    Attributes:
        attention: Attention to run; None is the choice of transformers.
        checkpoint: Makes each block of a stack (a module and the stack's name) run again in the backward; None if none does.
        mixed: Whether a model in 16 bit runs under autocast, too, as recipes with mixed_precision have it: some functions then
            compute in fp32.
        gathers: Whether the parameters of blocks come in the dtype that computes, as `fully_shard` gathers them: what autocast
            would leave in fp32, such as experts, is in 16 bit then.
        adapted: Rank of LoRA beside each linear layer but the head of a model that is frozen; 0 trains the model.
        on_experts: Whether stacks of experts have LoRA, too: PEFT then adds it to their weights before their products.
    """

    attention: str | None = None
    checkpoint: Callable[[Any, str], object] | None = None
    mixed: bool = True
    gathers: bool = False
    adapted: int = 0
    on_experts: bool = False


PLAIN: Final = Variant()
USUAL_RANK: Final = 8  # what a token passes is so narrow that ranks about it take about as little
