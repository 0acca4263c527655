"""Training state below a user's Trainer: what its own methods reach by `super()` is each rank's part, where stock has the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from transformers import Trainer


class StateBelow(Trainer):
    """Stands between the classes of users and `Trainer`, so that an override which calls `super()` gets here.

    The mixin, which comes before the classes of users, has the methods that it calls.
    """

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._hf_parallel_save_state(output_dir, super()._save_optimizer_and_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._hf_parallel_load_state(checkpoint, super()._load_optimizer_and_scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        self._hf_parallel_load_scaler(checkpoint, super()._load_scaler)

    def _hf_parallel_save_state(self, output_dir: str, stock: Callable[[str], None]) -> None:
        stock(output_dir)

    def _hf_parallel_load_state(self, checkpoint: str | None, stock: Callable[[str | None], None]) -> None:
        stock(checkpoint)

    def _hf_parallel_load_scaler(self, checkpoint: str | None, stock: Callable[[str | None], None]) -> None:
        stock(checkpoint)


def passes_on(method: Callable[..., Any]) -> bool:
    """Whether the code of a method names the one that it overrides, as in `super().method(...)`."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    names = {name for each in _codes(code) for name in each.co_names}
    return {"super", method.__name__} <= names


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """The code of a function and of those inside of it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)
