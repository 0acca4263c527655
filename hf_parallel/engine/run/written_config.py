"""Follows what a forward pass writes to the model's config, and repeats it on the stages where it does not run.

The loss of a classifier, which the last stage computes, notes what labels it has met, and a saved model is used by that.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from hf_parallel.compat.private_peft import base_model


class WrittenConfig:
    """Finds plain values of a model's config that have changed since it was made.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        config = getattr(base_model(model), "config", None)
        self._values = vars(config) if isinstance(config, PretrainedConfig) else {}
        self._before = dict(self._values)

    @property
    def written(self) -> dict[str, Any]:
        """Values of the config that this rank has written."""
        plain = {name: value for name, value in self._values.items() if isinstance(value, (str, int, float))}
        return {name: value for name, value in plain.items() if self._before.get(name) != value}

    def take(self, values: dict[str, Any]) -> None:
        """Write the values that another rank has written."""
        self._values.update(values)
