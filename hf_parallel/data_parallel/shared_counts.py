"""The parameters of a flat part share one count of steps; here is noted which of them took fewer.

An update by Adam depends on how many steps a parameter has taken (bias correction). One that had no gradient in some steps,
and is stepped on again, would be updated by the count of its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hf_parallel.data_parallel.flat import FlatShard
from hf_parallel.errors import UnsupportedError


logger = logging.getLogger(__name__)
COUNT = "step"  # the state that counts steps


@dataclass(frozen=True)
class Missed:
    """Steps that the part of a parameter has counted, and the parameter has not.

    Args:
        steps: Number of steps, at least 1.
        by_user: Whether user code wanted that (dropped its gradient, froze it), or may have; False: the model did not use it.
    """

    steps: int
    by_user: bool


class SharedCounts:
    """Knows which parameters took fewer steps than their part counts.

    Args:
        optimizer: Has the flat parts.
        stage: ZeRO's, for messages.

    Attributes:
        missed: Name -> what it lacks.
    """

    def __init__(self, optimizer: Optimizer, stage: int) -> None:
        self._optimizer, self._stage = optimizer, stage
        self.missed: dict[str, Missed] = {}

    def begin(self, shard: FlatShard, names: Iterable[str]) -> None:
        """Note that a part has counted steps which these parameters did not take, for a reason that nobody knows."""
        counted = self._count(shard)
        if counted:
            self.missed |= dict.fromkeys(names, Missed(counted, by_user=True))

    def step(self, shards: Sequence[FlatShard], absent_names: Collection[str], dropped: Collection[str]) -> None:
        """Count the steps that parameters miss, before the optimizer steps.

        Args:
            shards: The parts.
            absent_names: Names of parameters without a gradient on any rank.
            dropped: Names of those whose gradients user code has dropped.

        Raises:
            UnsupportedError: A parameter that missed a step because user code wanted it is stepped on again.
        """
        if not (absent_names or self.missed):
            return
        for shard in shards:
            if shard.master.grad is None:
                continue
            again = [name for name in shard.bucket.names if name in self.missed and name not in absent_names]
            if again and COUNT in self._optimizer.state.get(shard.master, {}):
                self._refuse_or_warn(again, shard)
            for name, parameter in zip(shard.bucket.names, shard.bucket.params, strict=True):
                if name in absent_names:
                    before = self.missed.get(name, Missed(0, by_user=False))
                    wanted = before.by_user or name in dropped or not parameter.requires_grad
                    self.missed[name] = Missed(before.steps + 1, wanted)

    def of(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """The state of one parameter of a part, with its own number of steps in the place of the part's.

        Raises:
            UnsupportedError: The numbers of this parameter cannot be known.
        """
        missed = self.missed.get(name)
        if missed is None or COUNT not in state:
            return state
        taken = {**state, COUNT: state[COUNT] - missed.steps}
        others = sorted(taken.keys() - {COUNT})
        if not others:
            return taken
        if taken[COUNT] > 0:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} keeps {', '.join(others)} beside its count of steps, and {name} had a gradient in "
                f"{float(taken[COUNT]):g} of {float(state[COUNT]):g} steps, with zero.stage={self._stage}: the parameters of a flat part "
                "share them, so what they are for this one is not known. Set zero.stage to 0 or 3, or save_strategy to no."
            )
        return {}

    def _count(self, shard: FlatShard) -> int:
        counted = self._optimizer.state.get(shard.master, {}).get(COUNT, 0)
        return int(counted.item() if isinstance(counted, Tensor) else counted)

    def _refuse_or_warn(self, again: Sequence[str], shard: FlatShard) -> None:
        wanted = next((name for name in again if self.missed[name].by_user), None)
        if wanted is not None:
            raise UnsupportedError(
                f"{wanted} took no part in {self.missed[wanted].steps} of {self._count(shard)} optimizer steps (its gradient was dropped by p.grad = "
                f"None, or it was frozen), and is stepped on now, with zero.stage={self._stage}: the optimizer counts steps for all "
                "parameters of a bucket together, so the bias correction would differ from that of one process. Set such gradients to "
                "zero, drop those of all parameters, or set zero.stage to 0 or 3."
            )
        logger.warning(
            "hf_parallel: %s has a gradient in some steps only. ZeRO does not change it in the others, but its "
            "Adam step count is shared by its bucket, so the bias correction differs from that of one process. Set "
            "zero.stage to 0 if that matters.",
            again[0],
        )
        for name in again:
            del self.missed[name]
