"""The same model with fewer blocks, as a config."""

from __future__ import annotations

import copy
from typing import Any


def with_layers(config: Any, layers: int) -> Any:
    """The same config with so many blocks."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    kinds = vars(text).get("layer_types")
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
    return changed
