"""Every error hf_parallel raises on purpose.

One family, so that `except ParallelError` catches all of it. A message has three parts: the key path and value (or the
parameter, file, rank) at fault, the rule with its numbers, and a concrete fix.
"""

from __future__ import annotations


MAX_LINE, MAX_LINES = 1600, 20


def bounded(text: str) -> str:
    """A message that can be read: of an endless line the ends, where key and fix stand; of endless lines the first."""
    lines = text.splitlines()
    if len(lines) <= MAX_LINES and len(text) <= MAX_LINE:
        return text
    half = MAX_LINE // 2
    cut = [
        line if len(line) <= MAX_LINE else f"{line[:half]} ... ({len(line) - 2 * half} characters) ... {line[-half:]}"
        for line in lines[:MAX_LINES]
    ]
    more = [f"... and {len(lines) - MAX_LINES} more lines."] if len(lines) > MAX_LINES else []
    return "\n".join([*cut, *more])


class ParallelError(Exception):
    """Base of every error raised by hf_parallel."""


class ConfigError(ParallelError, ValueError):
    """A setting, or a combination of settings, that cannot work.

    Raised before any process group exists, with the same text on every rank; holds all problems of a config at once.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(bounded(str(message)))


class PlanError(ParallelError, ValueError):
    """A model that cannot be cut into stages or sharded as asked; names the module and the reason."""


class ScheduleError(ParallelError, ValueError):
    """A schedule that breaks an invariant (a missing, repeated or deadlocking action); names the action."""

    def __init__(self, message: object = "") -> None:
        super().__init__(bounded(str(message)))


class CheckpointError(ParallelError, RuntimeError):
    """A checkpoint that cannot be written or read; names the file and the tensor."""


class RankMismatchError(ParallelError, RuntimeError):
    """Ranks that should agree (config, plan, batch) do not; names the ranks and both values."""


class RankFailure(ParallelError, RuntimeError):
    """Another rank raised, died or hung; names the rank, its stage and what was waited for."""


class UnsupportedError(ParallelError, NotImplementedError):
    """A feature that is configured or called but cannot be in effect; names the nearest setting that can."""
