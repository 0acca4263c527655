"""Methods of another package's classes that ours override: are they there, with the parameters that ours have?"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping


def changed_methods(kind: type, expected: Mapping[str, str]) -> list[str]:
    """Say which methods a class lacks or has with other parameters; empty if all are as expected.

    Args:
        kind: The class.
        expected: Method -> names of its parameters behind `self`, separated by spaces.
    """
    changed = []
    for name, parameters in expected.items():
        method = getattr(kind, name, None)
        found = " ".join(list(inspect.signature(method).parameters)[1:]) if callable(method) else None
        if found is None:
            changed.append(f"no {name}")
        elif found != parameters:
            changed.append(f"{name}({found.replace(' ', ', ')}) in place of {name}({parameters.replace(' ', ', ')})")
    return changed
