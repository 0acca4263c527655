"""Start-up lines are `info`: shown on stderr where a script has set up no logging, and as the script says where it has."""

from __future__ import annotations

import logging


class _UnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as the root logger has no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show_start_up_lines() -> None:
    """Let the package's `info` lines through, unless the script chose a level for it."""
    logger = logging.getLogger("hf_parallel")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _UnlessConfigured) for handler in logger.handlers):
        logger.addHandler(_UnlessConfigured())
