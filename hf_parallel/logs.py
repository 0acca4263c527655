"""Start-up lines are `info`: shown on stderr where a script has set up no logging, and as the script says where it has.

Tables are `debug`. The environment variable HF_PARALLEL_LOG chooses another level: debug, info, warning or error.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final


LEVEL_VARIABLE: Final = "HF_PARALLEL_LOG"
SLOW_S: Final = 2.0


class _UnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as the root logger has no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show_start_up_lines() -> None:
    """Let the package's `info` lines through, unless the script chose a level for it."""
    logger = logging.getLogger("hf_parallel")
    if logger.level == logging.NOTSET:
        chosen = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "").upper(), logging.INFO)
        logger.setLevel(chosen)
    if not any(isinstance(handler, _UnlessConfigured) for handler in logger.handlers):
        logger.addHandler(_UnlessConfigured())


def quiet_other_ranks(rank: int) -> None:
    """Show what other packages warn of on rank 0 only, unless Python was started with warning options.

    Args:
        rank: Rank of this process.
    """
    if rank == 0 or sys.warnoptions:
        return
    for package in ("torch", "transformers", "accelerate", "datasets", "deepspeed", "trl", "peft"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"{package}(\.|$)")


def quiet_without_device() -> None:
    """Leave out what torch says about pinned memory, which TrainingArguments ask for by default: on the CPU it is nothing."""
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator is found")


@contextmanager
def told_if_slow(tell: Callable[[], object], after_s: float = SLOW_S) -> Iterator[None]:
    """Around what may take long: says so once it does.

    Args:
        tell: Called once, from another thread, if the block still runs then.
        after_s: Seconds.
    """
    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
