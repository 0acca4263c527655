"""Trackers of transformers that save the model by a Trainer of their own, on the main process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.integrations.integration_utils import DVCLiveCallback, WandbCallback


if TYPE_CHECKING:
    from transformers import Trainer


def savers_of_model(trainer: Trainer) -> list[str]:
    """Settings by which trackers of a Trainer save the model when training ends, as transformers 5.24 reads them."""
    found = []
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._log_model.is_enabled:
            found.append(f"WANDB_LOG_MODEL={callback._log_model.value}")
        if isinstance(callback, DVCLiveCallback) and callback._log_model is True:
            found.append("HF_DVCLIVE_LOG_MODEL=true")
    return found
