"""Prints for commands: the answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hf_parallel.errors import ConfigError
from hf_parallel.logs import told_if_slow


def working(doing: str) -> contextlib.AbstractContextManager[None]:
    """Around what may take long: a line on stderr once it does."""
    return told_if_slow(lambda: print(f"{doing} ...", file=sys.__stderr__, flush=True))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what makes a file that the user named.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}). Name a file in a folder that exists."
        ) from None


@contextlib.contextmanager
def log_lines_on_stderr() -> Iterator[None]:
    """Send what imported packages, and the processes that they start, print meanwhile to stderr.

    A package may keep the stream that it finds (DeepSpeed's logger does), so this is the real one.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.__stderr__):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
