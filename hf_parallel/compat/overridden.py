"""Functions of other packages that ours take the place of."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def changed_methods(kind: type, expected: Mapping[str, str]) -> list[str]:
    """Say which methods a class lacks or has with other parameters; empty if all are as expected.

    A method that another package has put on the class says nothing of its release, and may take anything (`*args`).

    Args:
        kind: The class.
        expected: Method -> names of its parameters behind `self`, separated by spaces.
    """
    changed = []
    for name, parameters in expected.items():
        method = getattr(kind, name, None)
        if callable(method) and method.__module__.partition(".")[0] != kind.__module__.partition(".")[0]:
            continue
        found = " ".join(list(inspect.signature(method).parameters)[1:]) if callable(method) else None
        if found is None:
            changed.append(f"no {name}")
        elif found != parameters:
            changed.append(f"{name}({found.replace(' ', ', ')}) in place of {name}({parameters.replace(' ', ', ')})")
    return changed


def in_this_thread(function: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function` for the thread that runs now, and `stock` for all others.

    For what can only be replaced for a whole process while it is wanted by one call.
    """
    owner = threading.get_ident()

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == owner else stock)(*args, **kwargs)

    return call
