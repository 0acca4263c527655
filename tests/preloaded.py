"""What no rank should do again: the fork server of `rank_runner` imports this module once, and its ranks have it done.

Modules that a first training run imports late, and transformers' table of renamed weights, a thousand compiled patterns.
"""

from __future__ import annotations

import importlib

from transformers.conversion_mapping import get_checkpoint_conversion_mapping


MODULES: tuple[str, ...] = ()

for name in MODULES:
    importlib.import_module(name)
get_checkpoint_conversion_mapping("llama")
