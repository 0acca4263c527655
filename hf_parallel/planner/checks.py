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
MOST_BITS: Final = 16
MOST_STATE_BYTES: Final = 1024


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


def bits(value: Any) -> float:
    """`value` if it is the bits of a parameter, 1 to 16, or 0; else a ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value == 0 or 1 <= value <= MOST_BITS):
        raise ConfigError(
            f"block_bits={spelled(value)}: expected bits of a parameter, 1 to {MOST_BITS}, or 0 if the blocks are not quantised. Set it "
            "to 4.13 for NF4 with double quantisation, 4.5 without."
        )
    return float(value)


def share(value: Any) -> float:
    """`value` if it is above 0 and at most 1; else a ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(
            f"recompute_share={spelled(value)}: expected the share of the blocks that run again, above 0 to 1. Set it to 0.5 for every "
            "second block, or recompute to none."
        )
    return float(value)


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST_STATE_BYTES


def triple(value: Any) -> tuple[float, float, float]:
    """`value` if it is three sizes of at most 1024 bytes; else a ConfigError."""
    fine = isinstance(value, (tuple, list)) and len(value) == 3
    if not fine or not all(_is_size(one) for one in value):
        raise ConfigError(
            f"state_bytes={spelled(value)}: expected three numbers of 0 to {MOST_STATE_BYTES}: bytes of weights, gradients and "
            "optimizer per parameter. Correct it, or set it to null."
        )
    return float(value[0]), float(value[1]), float(value[2])
