"""The one place where gradient accumulation is decided: a number in our settings, else what Trainer or loop were given.

TrainingArguments cannot tell a given 1 from its default, so a number in the settings replaces 1 and contradicts any other.
"""

from __future__ import annotations

from typing import Literal

from hf_parallel.errors import ConfigError


def accumulation_steps(setting: int | Literal["auto"], given: int, where: str) -> int:
    """Batches of an optimizer step.

    Args:
        setting: `gradient_accumulation_steps` of our settings.
        given: The number that Trainer or loop have, 1 or more.
        where: Who was given it, for the error.

    Raises:
        ConfigError: The two are different numbers above 1.
    """
    if setting == "auto" or setting == given:
        return given
    if given == 1:
        return setting
    raise ConfigError(
        f"gradient_accumulation_steps={setting} with {where}(gradient_accumulation_steps={given}): an optimizer step cannot have "
        f"both numbers of batches. Leave it out of {where}, or set gradient_accumulation_steps of the settings to {given} or "
        "'auto'."
    )
