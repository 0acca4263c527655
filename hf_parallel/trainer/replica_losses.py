"""Around the losses of a Trainer on several replicas: `ReplicaShare` for its model, and for a `compute_loss_func`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor
from transformers import Trainer

from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.replica_share import ReplicaShare
from hf_parallel.guards.calls.additive import is_uncounted_sum


MOST_READ_AHEAD: Final = 64  # optimizer steps


class ReplicaLosses:
    """Gives the losses of one Trainer what they get on one replica."""

    def __init__(self) -> None:
        self._shares: deque[ReplicaShare] = deque(maxlen=MOST_READ_AHEAD)
        # A function, and whether it is a sum that ignores the number of tokens.
        self._sums: tuple[Any, bool] = (None, False)

    @contextlib.contextmanager
    def of_model(self, trainer: Trainer, engine: Engine | None, count: Any) -> Iterator[None]:
        """Around a `compute_loss` with `num_items_in_batch=count`, whose loss stock may multiply by the number of replicas."""
        share = self._share_of(trainer, count)
        if engine is None or share is None:
            yield
            return
        engine.share = share
        try:
            yield
        finally:
            engine.share = None

    @contextlib.contextmanager
    def of_function(self, trainer: Trainer, engine: Engine | None) -> Iterator[None]:
        """Inside, stock calls `compute_loss_func` with the share of this replica, if there is one."""
        share, function = None if engine is None else engine.share, trainer.compute_loss_func
        if share is None or function is None or self._is_uncounted_sum(trainer, function):
            yield
            return
        trainer.compute_loss_func = share.function(function)
        try:
            yield
        finally:
            trainer.compute_loss_func = function

    def count_in_model(self, trainer: Trainer, count: Any) -> Any:
        """The number that the model gets for `num_items_in_batch=count`: one object for one count, as calls are recognised by it."""
        share = self._share_of(trainer, count)
        return count if share is None else share.own

    def _share_of(self, trainer: Trainer, count: Any) -> ReplicaShare | None:
        replicas = replicas_that_multiply(trainer, count)
        if replicas == 1:
            return None
        share = next((one for one in self._shares if one.count is count), None)
        if share is None:
            share = ReplicaShare(count, replicas)
            self._shares.appendleft(share)
        return share

    def _is_uncounted_sum(self, trainer: Trainer, function: Callable[..., Tensor]) -> bool:
        """Whether the multiplication is right for a function that ignores the number of tokens, which is asked once."""
        if self._sums[0] is not function:
            model: Any = trainer.model
            self._sums = function, is_uncounted_sum(function, model.config, trainer.args.device)
        return self._sums[1]


def replicas_that_multiply(trainer: Trainer, count: Any) -> int:
    """The number by which the stock `compute_loss` multiplies a loss with `num_items_in_batch=count`."""
    normalised = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not (trainer.args.average_tokens_across_devices and normalised) or count is None:
        return 1
    return int(trainer.accelerator.num_processes // trainer.get_tp_size())
