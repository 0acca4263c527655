"""How many functions a piece of code calls, which the host's time follows at tiny kernels, and with models of which size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hf_parallel.compat.torch_tools import TorchDispatchMode
from hf_parallel.model.tensors import tensors_in


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


class MadeTensors(TorchDispatchMode):
    """Notes what this thread makes while it is entered; views and tensors without data are nothing made.

    Attributes:
        elements: Those of the largest tensor in memory of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        made = [t for t in tensors_in(out) if not t.is_meta and t.untyped_storage().data_ptr() not in given]
        self.elements = max([self.elements, *(tensor.numel() for tensor in made)])
        return out
