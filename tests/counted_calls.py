"""How many functions a piece of code calls, which the host's time follows at tiny kernels, and with models of which size."""

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


def sizes_of_calls(where: Any, *names: str) -> list[int]:
    """From now on, the elements of the model that functions of a module are called with first, a number for each call."""
    sizes: list[int] = []

    def counted(name: str) -> None:
        real = getattr(where, name)

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(sum(p.numel() for p in model.parameters()))
            return real(model, *args, **kwargs)

        setattr(where, name, call)

    for name in names:
        counted(name)
    return sizes
