"""Models made from their configs alone, whose weights nobody has read."""

from __future__ import annotations

from typing import Any

from hf_parallel.errors import ConfigError
from hf_parallel.settings.values import spelled


def build_on_meta(config: Any, **options: Any) -> Any:
    """The model of a config without its weights, made with `options` of `from_config`; a ConfigError if there is none."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # noqa: BLE001 - the code of a model raises what it likes on odd sizes
        raise ConfigError(
            f"model type {spelled(config.model_type)} cannot be built from its config: {first_line(error)} "
            "Give the config of a causal language model."
        ) from None


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
