"""Configs whose layers have values of their own."""

from __future__ import annotations

from typing import Any


def config_of_layer(config: Any, index: int) -> Any:
    """The config of one layer: the model's itself, but where layers differ in it (Gemma 4 since transformers 5.24).

    Such a config of a model refuses to tell what differs, with an error that `getattr` with a default lets through.
    """
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config
