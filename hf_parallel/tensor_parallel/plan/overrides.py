"""Overrides of the derived plan by the user's settings, and hints from the model's own plan."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import get_args

from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.settings.sections import Treatment


OVERRIDDEN = "tensor_parallel.plan says so"  # the reason of a module that is gathered or replicated for this only


def override_for(overrides: Mapping[str, Treatment], name: str) -> Treatment | None:
    """The value of the last pattern that matches `name`; None if none does."""
    return next(
        (treatment for pattern, treatment in reversed(list(overrides.items())) if fnmatchcase(name, pattern)), None
    )


def resolve_overrides(overrides: Mapping[str, Treatment], names: Iterable[str]) -> dict[str, Treatment]:
    """Module -> its override; the last matching pattern counts.

    Args:
        overrides: Pattern of module names (`*` matches any characters) -> "pair" (refuse to do anything else),
            "gather" (never pair) or "replicate" (every rank holds all of it).
        names: Names of the modules that can be sharded.

    Raises:
        PlanError: A pattern names none of them, or its value is unknown.
    """
    known = sorted(set(names))
    resolved: dict[str, Treatment] = {}
    for pattern, treatment in overrides.items():
        if treatment not in get_args(Treatment):
            raise PlanError(
                f"tensor_parallel.plan[{pattern!r}]={treatment!r}. Choose one of {', '.join(get_args(Treatment))}."
            )
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, known, 3, 0.3) or known[:3]
            raise PlanError(
                f"tensor_parallel.plan[{pattern!r}] names none of the {len(known)} modules that can be sharded. "
                f"Similar names: {', '.join(close)}."
            )
        resolved.update(dict.fromkeys(matching, treatment))
    return resolved


def hinted_rows(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Linears that the model's `base_model_tp_plan` splits by rows: tried first, verified like any other."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    patterns = [
        re.compile(r"(^|.*\.)" + re.escape(pattern).replace(r"\*", r"[^.]+") + "$")
        for pattern, style in plan.items()
        if str(style).startswith("rowwise")
    ]
    return frozenset(
        name for name in names if any(pattern.match(name.removesuffix(".base_layer")) for pattern in patterns)
    )
