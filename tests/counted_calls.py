"""How many functions a piece of code calls: what the host's time follows at tiny kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def counted_calls(run: Callable[[], Any]) -> int:
    """Calls of Python and C functions during the second of two runs: the first looks up what is kept."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()
    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
