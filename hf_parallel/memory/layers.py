"""Configs of the same model with more or fewer blocks."""

from __future__ import annotations

import copy
from typing import Any


# Of an encoder and a decoder `num_hidden_layers` is the encoder's, which is not trained here.
NAMES = ("decoder_layers", "num_decoder_layers", "num_blocks")


def number_of_blocks(config: Any) -> int | None:
    """Number of blocks of a config's decoder; None if it does not say."""
    text = config.get_text_config()
    found: int | None = getattr(text, _names(text)[0], None)
    return found


def with_layers(config: Any, layers: int) -> Any:
    """A copy of the config with so many blocks, and as many entries in the lists that have one for each."""
    changed = copy.deepcopy(config)
    text, before = changed.get_text_config(), number_of_blocks(config)
    for name in {*_names(text), *({"num_hidden_layers"} & vars(text).keys())}:
        setattr(text, name, layers)
    for name, kinds in list(vars(text).items()):  # layer_types, attention_layers
        of_blocks = "layer" in name or name.endswith(("_types", "_type"))
        if of_blocks and isinstance(kinds, list) and kinds and len(kinds) == before:
            setattr(text, name, [kinds[index % len(kinds)] for index in range(layers)])
    return changed


def _names(text: Any) -> list[str]:
    return [name for name in NAMES if name in vars(text)] or ["num_hidden_layers"]
