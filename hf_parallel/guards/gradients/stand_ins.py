"""Stand-ins in the place of the gradients of many parameters, put there and taken away after every batch."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hf_parallel.guards.gradients.shown import SharedGradient


_GRAD: Any = Tensor.grad  # the descriptor, which `map` calls without a loop of Python


class StandIns:
    """Stand-ins for the gradients in a step: later batches add to the same gradient, which keeps its stand-in.

    Args:
        make: Makes the stand-in for a gradient of a parameter, which has a name.
    """

    def __init__(self, make: Callable[[str, nn.Parameter, Tensor], SharedGradient]) -> None:
        self._make = make
        self.forget()

    def forget(self) -> None:
        """Forget the stand-ins, which would keep the gradients of a step that is over."""
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._behind: list[Tensor | None] = []
        self._stands: list[SharedGradient | None] = []

    def named(self) -> Mapping[str, SharedGradient]:
        """Stand-ins that exist now, by name of the parameter."""
        pairs = zip(self._names, self._stands, strict=True)
        return {name: stand for name, stand in pairs if stand is not None}

    def put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put them in the place of gradients.

        Args:
            parameters: By name; those of the first call since `forget` count.
        """
        if not self._names:
            self._names, self._parameters = list(parameters), list(parameters.values())
            self._behind, self._stands = [None] * len(parameters), [None] * len(parameters)
        now = list(map(_GRAD.__get__, self._parameters))
        if not all(map(operator.is_, now, self._behind)):  # not what the batches before have added to
            for index, (gradient, before) in enumerate(zip(now, self._behind, strict=True)):
                if gradient is not before:
                    made = (
                        None if gradient is None else self._make(self._names[index], self._parameters[index], gradient)
                    )
                    self._stands[index] = made
            self._behind = now
        _put(self._parameters, self._stands)

    def take(self, *, touched: bool) -> list[nn.Parameter]:
        """Put back what they stand for.

        Args:
            touched: Whether somebody has opened one, or autograd has added to one.

        Returns:
            Parameters that now have another gradient, or a stand-in that was touched.
        """
        if not touched and all(map(operator.is_, map(_GRAD.__get__, self._parameters), self._stands)):
            _put(self._parameters, self._behind)
            return []
        left = []
        for parameter, gradient, stand in zip(self._parameters, self._behind, self._stands, strict=True):
            if parameter.grad is stand and not touched:
                parameter.grad = gradient
            elif parameter.grad is not None:
                left.append(parameter)
        return left


def _put(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """`parameter.grad = gradient` for each pair."""
    collections.deque(map(_GRAD.__set__, parameters, gradients), maxlen=0)
