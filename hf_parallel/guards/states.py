"""The state of an optimizer whose parameters are flat parts: nobody finds the state of a model's parameter there.

`optimizer.state[p]` would make an empty entry, and `optimizer.state.pop(p, None)` (a reset of moments) would do nothing, both
without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hf_parallel.errors import UnsupportedError


class PartStates(defaultdict[Any, Any]):
    """States of parts, which refuses to be asked for those of parameters.

    Args:
        states: By part.
        names: Id of a model's parameter -> its name.
    """

    def __init__(self, states: dict[Any, Any], names: dict[int, str]) -> None:
        super().__init__(dict, states)
        self.names = names

    def _check(self, key: Any) -> None:
        if isinstance(key, Tensor) and id(key) in self.names:
            raise UnsupportedError(
                f"optimizer.state of parameter {self.names[id(key)]} with zero.stage above 0: the optimizer has flat parts of all "
                "parameters, and one state a part. Change the states of optimizer.state.values() alike (moments to zero), or set "
                "zero.stage to 0."
            )

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def guard_states(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> None:
    """Let an optimizer of parts refuse to be asked for the states of parameters; again after states were loaded."""
    if type(optimizer.state) is not PartStates:
        optimizer.state = PartStates(optimizer.state, {id(parameter): name for name, parameter in named})
