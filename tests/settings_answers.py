"""What an answer to a file or a mapping of settings may be, and texts that several tests put in."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


LONGEST = 6000  # characters of a message: dozens of problems, each with its fix
TOO_LONG_S = 20  # an answer takes milliseconds; what has no bound takes minutes, on any machine
HEAD = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
NINES = "9" * 5000


@contextlib.contextmanager
def answering(seed: object, text: str) -> Iterator[None]:
    """Fail with the seed and the text if what is inside raises anything but our errors, or does not end."""

    def too_long(*args: Any) -> None:
        raise TimeoutError(f"no answer within {TOO_LONG_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(TOO_LONG_S)
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {str(error)[:500]}\n---\n{text[:3000]}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
