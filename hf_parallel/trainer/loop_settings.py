"""Settings that a loop without a Trainer does not read."""

from __future__ import annotations

from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS


def refuse_in_loop(config: HFParallelConfig) -> None:
    """Refuse settings that only a Trainer reads.

    Raises:
        ConfigError: Names them.
    """
    given = {
        "global_batch_size": config.global_batch_size,
        "checkpoint.memory_steps": config.checkpoint.memory_steps or None,
        "checkpoint.async_save": "true" if config.checkpoint.async_save else None,
        "pipeline.schedule": config.pipeline.schedule if config.pipeline.schedule in ASYNCHRONOUS else None,
    }
    unread = [f"{name}={value}" for name, value in given.items() if value is not None] + config.monitor.asked
    if unread:
        raise ConfigError(
            f"{', '.join(unread)} in a loop without a Trainer has no effect: the loop decides how it accumulates batches and saves, "
            "and does not say where its steps end. Leave it out, or train with a Trainer."
        )
