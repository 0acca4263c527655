"""What a pipeline's model call returns, and clear words for what it does not have.

A stock output answers an unknown name with a bare `AttributeError`, far from the reason: that a pipeline returns loss
and logits only, and a fused step not even logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from hf_parallel.errors import UnsupportedError


# What a stock output has under these names is None unless it was asked for, and a pipeline refuses to be asked.
NONE_UNASKED = ("past_key_values", "hidden_states", "attentions")
LOGITS = ("logits", 1)  # by name and by place behind a loss


class MissingOutput(UnsupportedError, AttributeError, KeyError, IndexError):
    """Asked of a pipeline's output by attribute, key or position; what `hasattr` and `except KeyError` expect."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class _ExplainsMissing:
    """Over a model output: every way to ask for what it does not have ends in `_why_not`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in NONE_UNASKED:
            return None
        raise MissingOutput(self._why_not(name))

    def __getitem__(self, key: Any) -> Any:
        held: Any = super()
        try:
            return held.__getitem__(key)
        except (KeyError, IndexError):
            raise MissingOutput(self._why_not(key)) from None

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict, for what a stock output may lack too; anything else is refused instead of being None."""
        held: Any = super()
        if key in self:  # type: ignore[attr-defined]
            return held.__getitem__(key)
        if key in ("loss", *NONE_UNASKED):
            return default
        raise MissingOutput(self._why_not(key))

    def _why_not(self, key: Any) -> str:
        return (
            f"outputs[{key!r}] of a model with pp_size above 1: a pipeline returns loss and logits only, because "
            "everything else that a model's forward returns stays on its last stage. Compute it from logits (call the "
            "model without labels), or train with pp_size 1."
        )


@dataclass(repr=False)
class PipelineOutput(_ExplainsMissing, ModelOutput):
    """Loss and logits; the logits are None where nobody needs them.

    Args:
        loss: Of the batch (0-d).
        logits: f[B S V].
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass(repr=False)
class PipelineTrainingOutput(_ExplainsMissing, ModelOutput):
    """Output of a fused training forward: the loss. Its logits are made by a second forward, for who asks for them.

    Args:
        loss: Of the batch (0-d).
    """

    loss: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return self._logits() if name == "logits" and self._can_run_again() else super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        asked = isinstance(key, (str, int)) and key in LOGITS and self._can_run_again()
        return self._logits() if asked else super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict, with logits."""
        return self._logits() if key == "logits" and self._can_run_again() else super().get(key, default)

    def runs_again(self, again: Callable[[], torch.Tensor]) -> PipelineTrainingOutput:
        """Have `again` make the logits f[B S V] when they are asked for: collective over the ranks of a model copy."""
        vars(self)["_again"] = again
        return self

    def _can_run_again(self) -> bool:
        return "_again" in vars(self)

    def _logits(self) -> torch.Tensor:
        made: dict[bool, torch.Tensor] = vars(self).setdefault("_made", {})
        wants_graph = torch.is_grad_enabled()
        found = made.get(True, made.get(wants_graph))
        if found is None:
            found = made[wants_graph] = vars(self)["_again"]()
        return found

    def _why_not(self, key: Any) -> str:
        if key in LOGITS:
            return (
                "logits do not exist in a fused pipeline step: the backward has already run. A loss of your own on "
                "logits works when the model is called without labels (labels = inputs.pop('labels')), or as "
                "Trainer(compute_loss_func=...)."
            )
        return (
            f"outputs[{key!r}] of a training step with pp_size above 1: it has loss and logits only, because the backward "
            "has already run, stage by stage. What is computed from logits works when the model is called without labels "
            "(labels = inputs.pop('labels')); for anything else train with pp_size 1."
        )
