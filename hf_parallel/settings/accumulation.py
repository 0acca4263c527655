"""The one place where gradient accumulation is decided: a number in our settings, else what Trainer or loop were given.

TrainingArguments cannot tell a given 1 from its default, so a number in the settings replaces 1 and contradicts any other.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from hf_parallel.errors import ConfigError


Wanted: TypeAlias = int | Literal["auto"]


def agreed(wanted: Wanted, given: int, where: str) -> int:
    """Batches of an optimizer step.

    Args:
        wanted: `gradient_accumulation_steps` of our settings.
        given: The number that Trainer or loop have, 1 or more.
        where: Who was given it, for the error.

    Raises:
        ConfigError: The two are different numbers above 1.
    """
    if wanted == "auto" or wanted == given:
        return given
    if given == 1:
        return wanted
    raise ConfigError(
        f"gradient_accumulation_steps={wanted} with {where}(gradient_accumulation_steps={given}): an optimizer step cannot have "
        f"both numbers of batches. Leave it out of {where}, or set gradient_accumulation_steps of the settings to {given} or "
        "'auto'."
    )
