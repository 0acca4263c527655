"""Reads values of settings from YAML, and spells them in messages.

Pure (pydantic only, no torch).
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


MAX_SHOWN = 80  # characters of a value in a message
MAX_SIZE = 1 << 16  # ranks of an axis, stages of a pipeline: far above any cluster, and still quick to count
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def number(value: object) -> object:
    """YAML 1.1 reads `5e8` as a string; give the field the number that was meant."""
    if isinstance(value, str) and len(value) <= MAX_SHOWN and _NUMBER.fullmatch(value.strip()):
        found = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        return int(found) if math.isfinite(found) and found == int(found) else found
    return value


def as_tuple(value: object) -> object:
    return tuple(number(item) for item in value) if isinstance(value, list) else number(value)


def on_off(value: object) -> object:
    """YAML 1.1 reads the words `on` and `off` as booleans; give them back."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Count = Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(number)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE), BeforeValidator(number)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(number)]
Factor = Annotated[float, Field(gt=1, allow_inf_nan=True), BeforeValidator(number)]
NonNegative = Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(number)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=True), BeforeValidator(number)]


def shown(value: object) -> str:
    """A value in a message: its repr, and of a long one the beginning."""
    if isinstance(value, int) and value.bit_length() > 8 * MAX_SHOWN:
        return f"<an integer of {value.bit_length()} bits>"
    plain = value[: 2 * MAX_SHOWN] if isinstance(value, str) else value
    try:
        text = repr(plain)
    except (ValueError, RecursionError):  # an integer inside that has too many digits; a list inside itself
        text = f"<a {type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def spelled(value: object) -> str:
    """A value as one would type it in the YAML file."""
    text = shown(list(value) if isinstance(value, tuple) else value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


class Section(BaseModel):
    """Settings that belong together: strict types, no unknown keys, no change after validation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
