"""Hooks of ours around the step of an optimizer: after those of user code, and once a step. Also what clears its gradients.

User code may register hooks at any time, which look at gradients as user code sees them. A class may call the step of its
base, which runs all hooks again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from hf_parallel.compat.private_optimizers import is_of_loss_scaler, own_step, step_hooks


def clears_both(optimizer: Optimizer, cleared: Callable[[bool], None]) -> None:
    """Let `zero_grad` of an optimizer of flat parts clear the model's parameters too, as in stock.

    Args:
        optimizer: Whoever holds it: user code may have the one that was given to `prepare`.
        cleared: Called after the parts are cleared, with `set_to_none`.
    """
    own = optimizer.zero_grad

    @functools.wraps(own)
    def zero_grad(set_to_none: bool = True) -> None:
        own(set_to_none)
        cleared(set_to_none)

    vars(optimizer)["zero_grad"] = zero_grad


class OwnHooks:
    """Hooks of this package on an optimizer. Make it before they are registered, and call `settle` after.

    Args:
        optimizer: The optimizer.
        refuse: Raises if the optimizer must not step as it does now; called when its step is another one.
    """

    def __init__(self, optimizer: Optimizer, refuse: Callable[[], None]) -> None:
        self._optimizer, self._refuse = optimizer, refuse
        self._step = self._step_now()
        self._before, self._after = step_hooks(optimizer)
        self._others = {*self._before, *self._after}
        self._mine: list[int] = []
        self._depth = 0

    def settle(self) -> None:
        """Make hooks that were registered since construction run once per optimizer step, also when steps nest."""
        self._mine = [key for key in self._before if key not in self._others]
        for table in (self._before, self._after):
            for key in table:
                if key not in self._others:
                    table[key] = self._outermost(table[key])
        self._optimizer.register_step_post_hook(self._leave)
        if self._mine:
            self._before[self._mine[0]] = self._entering(self._before[self._mine[0]])

    def begin(self) -> None:
        """Put our hooks behind those that were registered since, as a step begins."""
        self._look()
        self._depth = 0  # a step that raised leaves nothing behind
        if list(self._before)[-len(self._mine) :] != self._mine:
            for key in self._mine:
                self._before.move_to_end(key)

    def _step_now(self) -> tuple[Any, type, Any]:
        kind = type(self._optimizer)
        return own_step(self._optimizer), kind, kind.step

    def _look(self) -> None:
        now = self._step_now()
        if now != self._step and not is_of_loss_scaler(now[0]):
            self._refuse()
            self._step = now

    def _entering(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._look()  # user code may have the optimizer that was given to `prepare`
            self._depth += 1
            return hook(*args)

        return run

    def _leave(self, *args: Any) -> None:
        self._depth -= 1

    def _outermost(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self._depth > 1:
                return None
            try:
                return hook(*args)
            except BaseException:
                self._depth = 0  # there will be no end of this step
                raise

        return run
