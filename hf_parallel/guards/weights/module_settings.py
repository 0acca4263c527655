"""Plain values that modules compute with, and how many hooks they have: what a callback may change between two steps."""

from __future__ import annotations

from typing import Any

from torch import nn


PLAIN = (int, float, bool, str)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Numbers, switches and words of modules, and the number of hooks on each, by name.

    Without `training`, which a Trainer sets before every step, and without the config, which saving a model writes to.
    """
    return {
        f"{prefix}.{key}".lstrip("."): value if type(value) in PLAIN else len(value)
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if (type(value) in PLAIN and key != "training") or key in HOOKS
    }


def changed_setting(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The name of the first that is another one, with both values; empty if none is."""
    for name in [*before, *now]:
        one, other = before.get(name), now.get(name)
        if one != other and not (one != one and other != other):  # NaN is the same NaN
            return f"{name} ({one} before, {other} now)"
    return ""
