"""Find modules that run another forward than before: one was put on a module or its class, or the class changed."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, methodcaller
from typing import Any

from torch import nn


class Forwards:
    """Looked at before every forward pass: no loop in Python over modules where nothing has changed.

    Args:
        modules: Modules that are looked at, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names, self._modules = list(modules), list(modules.values())
        self._attributes = list(map(vars, self._modules))
        self._remember()

    def _remember(self) -> None:
        self._own = list(map(_own_forward, self._attributes))
        self._kinds = list(map(type, self._modules))
        self._of_kinds: dict[type, Any] = {kind: _forward_of(kind) for kind in set(self._kinds)}
        pairs = zip(self._own, self._kinds, strict=True)
        self._run = [self._of_kinds[kind] if own is None else own for own, kind in pairs]

    def replaced(self) -> list[str]:
        """Names of those that have run another forward until now."""
        if (
            list(map(_own_forward, self._attributes)) == self._own
            and list(map(type, self._modules)) == self._kinds
            and all(_forward_of(kind) == forward for kind, forward in self._of_kinds.items())
        ):
            return []
        before = self._run
        self._remember()
        return [name for name, old, new in zip(self._names, before, self._run, strict=True) if old != new]


_own_forward = methodcaller("get", "forward")  # of the attributes of a module
_forward_of = attrgetter("forward")
