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
        where: Object that was given it, for the error.

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


def accumulation_for(global_batch: int, rows: int, replicas: int, given: int) -> int:
    """Batches of an optimizer step that has `global_batch` rows.

    Args:
        global_batch: `global_batch_size` of our settings.
        rows: Rows of a batch of one replica.
        replicas: Model copies.
        given: The number that TrainingArguments have, 1 or more.

    Raises:
        ConfigError: The rows cannot be shared out evenly, or TrainingArguments say a number, too.
    """
    if given != 1:
        raise ConfigError(
            f"global_batch_size={global_batch} with TrainingArguments(gradient_accumulation_steps={given}): the number of batches of a "
            "step follows from the number of replicas. Leave it out of TrainingArguments, or remove global_batch_size."
        )
    steps, rest = divmod(global_batch, rows * replicas)
    if rest or not steps:
        fit = [str(n) for n in range(1, global_batch // rows + 1) if global_batch % (rows * n) == 0]
        those = f"{', '.join(fit[-8:])} replicas fit" if fit else f"no number of replicas fits {rows} rows"
        raise ConfigError(
            f"global_batch_size={global_batch} with per_device_train_batch_size={rows} and {replicas} replicas: batches of all of "
            f"them have {rows * replicas} rows, of which {global_batch} is no multiple. {those[0].upper()}{those[1:]}: start as many "
            f"processes, or set per_device_train_batch_size so that it times {replicas} divides {global_batch}."
        )
    return steps
