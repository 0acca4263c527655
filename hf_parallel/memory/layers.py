"""The same model with fewer blocks, as a config."""

from __future__ import annotations

import copy
from typing import Any


def with_layers(config: Any, layers: int) -> Any:
    """The same config with so many blocks."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    before = text.num_hidden_layers
    text.num_hidden_layers = layers
    for name, kinds in list(vars(text).items()):  # layer_types, attention_layers
        if "layer" in name and isinstance(kinds, list) and kinds and len(kinds) == before:
            setattr(text, name, [kinds[index % len(kinds)] for index in range(layers)])
    return changed
