"""Configs whose layers have values of their own."""

from __future__ import annotations

from typing import Any


def config_of_layer(config: Any, index: int) -> Any:
    """The config of one layer: the model's itself, but where layers differ in it (Gemma 4 since transformers 5.24).

    Such a config of a model refuses to tell what differs, with an error that `getattr` with a default lets through.
    """
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def settings_of_layers(config: Any) -> dict[int, dict[str, Any]]:
    """Index of a layer -> what it has in place of the model's values; empty where layers do not differ."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(index): own for index, own in config.to_dict()["per_layer_config"].items()}
