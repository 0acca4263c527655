"""The states of guarded optimizers as user code sees them.

An optimizer with ZeRO updates flat parts, and keeps its states by part. User code is shown states by parameter of the model
instead, and what it writes there is brought to the parts before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.guards.optimizers.parts import ShownOptimizer
from hf_parallel.guards.optimizers.states import guard_states, shown_states
from hf_parallel.ledger import Ledger


class OptimizerStates:
    """Shows the states of one rank's optimizers by parameter of the model.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter (a shard where the entry has a spec).
        replicas: Has the partition of the optimizer, if there is one.

    Attributes:
        is_known: Whether a tensor was made of this rank's part of a parameter; set where user code is followed.
    """

    def __init__(self, ledger: Ledger, parameters: Mapping[str, nn.Parameter], replicas: Replicas) -> None:
        self._ledger, self._parameters, self._replicas = ledger, parameters, replicas
        self._shown_parts: ShownOptimizer | None = None
        self.is_known: Callable[[Tensor], bool] = lambda tensor: False

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse, from now on, reads of a parameter's state where the optimizer has flat parts."""
        zero = self._replicas.zero
        if zero is not None and optimizer is zero.optimizer:
            guard_states(
                optimizer, ((n, p) for s in zero.shards for n, p in zip(s.bucket.names, s.bucket.params, strict=True))
            )

    def shown_parts(self, optimizer: torch.optim.Optimizer) -> ShownOptimizer | None:
        """The view that user code has of a guarded optimizer of flat parts; None of another optimizer."""
        zero = self._replicas.zero
        if zero is None or optimizer is not zero.optimizer:
            return None
        self._shown_parts = self._shown_parts or ShownOptimizer(zero, self._parameters)
        return self._shown_parts

    def shown(self, optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
        """The states of a guarded optimizer as user code sees them: those of parts say so."""
        parts = self.shown_parts(optimizer)
        if parts is not None:
            return parts.states()
        shards = {id(p) for name, p in self._parameters.items() if self._ledger.entries[name].spec is not None}
        if not shards:
            return optimizer.state
        return shown_states(optimizer.state, lambda p: id(p) in shards, lambda tensor: self.is_known(tensor))

    def settle(self) -> None:
        """Take over what user code wrote to the states of a partitioned optimizer; before a step, and before they are saved.

        Raises:
            UnsupportedError: Parameters that share a state were treated unlike each other.
        """
        if self._shown_parts is not None:
            self._shown_parts.settle()
