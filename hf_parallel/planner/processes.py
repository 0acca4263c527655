"""Processes that measure something together: all at once, each says what it does, and none is left."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from hf_parallel.errors import ConfigError


KILLED_S: Final = 10.0  # until a process that was killed has gone


def run_ranks(ranks: int, target: Callable[..., None], args: Sequence[Any], folder: Path, limit_s: float) -> None:
    """Run `target(rank, *args)` in a process of each rank, all at once; none is left when this returns.

    Args:
        ranks: Processes.
        target: A function of a module, as processes are spawned.
        args: Arguments of `target` after the rank.
        folder: Folder that `wait_for` reads.
        limit_s: Seconds.

    Raises:
        ConfigError: See `wait_for`.
    """
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_rank, args=(target, rank, *args), daemon=True) for rank in range(ranks)]
    try:
        for one in started:
            one.start()
        wait_for(started, folder, limit_s)
    finally:
        for one in started:
            if one.pid is not None:  # it was started
                one.kill()
                one.join(KILLED_S)


def _rank(target: Callable[..., None], rank: int, *args: Any) -> None:
    """A rank ends without Python's own clearing up: a thread that is in gloo or in the store meanwhile would abort the process."""
    target(rank, *args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait_for(started: Sequence[BaseProcess], folder: Path, limit_s: float) -> None:
    """Wait until all ranks have ended well; no longer than `limit_s` seconds, nor than until one has failed.

    Args:
        started: The process of each rank.
        folder: Where each writes what it does, in a file of `step_file`.
        limit_s: Seconds.

    Raises:
        ConfigError: A rank failed or is not done; names it and its step.
    """
    deadline, left = time.monotonic() + limit_s, dict(enumerate(started))
    while left:
        ended = connection.wait([one.sentinel for one in left.values()], max(0.0, deadline - time.monotonic()))
        if not ended:
            words = ", ".join(f"rank {rank} {_step(folder, rank)}" for rank in left)
            raise ConfigError(
                f"calibrate: not done after {limit_s:g} s: {words}. Measure when the machine has less to do, or give fewer ranks."
            )
        for rank, one in list(left.items()):
            if one.sentinel not in ended:
                continue
            one.join()
            del left[rank]
            if one.exitcode != 0:
                raise ConfigError(
                    f"calibrate: rank {rank} ended with code {one.exitcode} {_step(folder, rank)}. Look at its messages, or give "
                    "fewer ranks."
                )


def step_file(folder: Path, rank: int) -> Path:
    """The file in which a rank notes what it does, in words."""
    return folder / f"{rank}.step"


def _step(folder: Path, rank: int) -> str:
    file = step_file(folder, rank)
    return f"while it {file.read_text(encoding='utf-8')}" if file.exists() else "before it had started Python"
