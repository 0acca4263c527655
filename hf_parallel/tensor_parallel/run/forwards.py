"""Putting a forward of tensor parallelism over that of a module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def put_over(module: nn.Module, key: str, state: Any, forward: Callable[..., Any]) -> None:
    """Let `module(...)` run `forward(module, ...)`; in place, over whatever was put there before.

    A bound method and plain attributes, not a closure: a copy of the module then runs the copy's settings and weights.

    Args:
        module: The module.
        key: Attribute under which `forward` finds `state`, and as `<key>_inner` the forward that it replaces.
        state: Its settings.
        forward: Called with the module first.
    """
    vars(module)[f"{key}_inner"] = module.forward
    vars(module)[key] = state
    vars(module)["forward"] = MethodType(forward, module)
