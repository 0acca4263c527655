"""The explicit form: a Trainer class with hf_parallel built in."""

from __future__ import annotations

from typing import Any

from hf_parallel.trainer.callback import HFParallelCallback
from hf_parallel.trainer.mixin import HFParallelTrainerMixin
from hf_parallel.trainer.state_below import StateBelow


class HFParallelTrainer(HFParallelTrainerMixin, StateBelow):
    """A Trainer with hf_parallel built in, for those who prefer a class to a callback.

    Args:
        *args: Arguments of `transformers.Trainer`.
        config: None (the YAML given to `accelerate launch`), a path, a recipe name, a mapping, or an
            `HFParallelConfig`.
        sample: A small batch to plan with, as for `HFParallelCallback`.
        **kwargs: Arguments of `transformers.Trainer`.

    Raises:
        ConfigError: All problems of the settings at once.
    """

    def __init__(self, *args: Any, config: Any = None, sample: Any = None, **kwargs: Any) -> None:
        callbacks = [*(kwargs.pop("callbacks", None) or []), HFParallelCallback(config, sample=sample)]
        kwargs["callbacks"] = callbacks
        super().__init__(*args, **kwargs)
