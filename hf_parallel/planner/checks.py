"""Checks of what users give the planner: each returns the value or raises a ConfigError with name, value, rule and fix."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.settings.values import spelled


MOST: Final = 10**12


def choose(parameter: str, value: object, known: Any) -> Any:
    """`value` if it is among the known ones.

    Raises:
        ConfigError: It is not; names the nearest known ones.
    """
    names = list(known)
    if not isinstance(value, bool) and isinstance(value, (str, numbers.Integral)) and value in names:
        return names[names.index(value)]
    raise ConfigError(
        f"{parameter}={spelled(value)}: unknown. Did you mean {_nearest(value, names)}? Known: {', '.join(map(str, names))}."
    )


def _nearest(value: object, names: Sequence[Any]) -> str:
    """The known number, or up to three known words, that are the most like `value`."""
    if isinstance(value, numbers.Real) and all(isinstance(name, int) for name in names):
        return str(min(names, key=lambda name: abs(name - value)))
    words, wanted = [str(name) for name in names], str(value).lower()
    near = [word for word in words if wanted and word.startswith(wanted)]
    near += difflib.get_close_matches(wanted, words, 3, 0.6) or difflib.get_close_matches(wanted, words, 1, 0.0)
    return " or ".join(list(dict.fromkeys(near))[:3])


def whole(parameter: str, value: object, least: int = 1) -> int:
    """`value` if it is an integer of at least `least` that floats can count; else a ConfigError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(
            f"{parameter}={spelled(value)}: expected an integer of {least} or more. Set it to {least} or more."
        )
    if int(value) > MOST:
        raise ConfigError(f"{parameter}={spelled(value)}: expected at most {MOST}. Set it to {MOST} or less.")
    return int(value)


def positive(parameter: str, value: object) -> float:
    """`value` if it is a finite number above 0; else a ConfigError."""
    fine = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not fine or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise ConfigError(f"{parameter}={spelled(value)}: expected a number above 0. Set it to one, or leave it out.")
    return float(value)  # type: ignore[arg-type]


def optional(parameter: str, value: object) -> float | None:
    return None if value is None else positive(parameter, value)


def all_of(checks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run all checks, and return their results; one ConfigError with the words of all that refuse."""
    found, problems = {}, []
    for name, check in checks.items():
        try:
            found[name] = check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found
