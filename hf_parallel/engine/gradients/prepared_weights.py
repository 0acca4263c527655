"""Notices weights that were replaced since the model was prepared: an optimizer would update what the model has no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.guards.weights.exchanged import WeightGuard
from hf_parallel.ledger import Ledger


class PreparedWeights:
    """The weights of one rank; watched from the first optimizer on that updates them.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        sharded: The model with sharded parameters (ZeRO 3); None without one.
        in_window: Whether the last backward pass was not the last of its step.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        sharded: ShardedModel | None,
        in_window: Callable[[], bool],
    ) -> None:
        self._ledger, self._parameters, self._sharded, self._in_window = ledger, parameters, sharded, in_window
        self._guard: WeightGuard | None = None

    @property
    def are_watched(self) -> bool:
        """Whether an optimizer updates them."""
        return self._guard is not None

    def watch(self, model: nn.Module) -> None:
        """Watch them from now on.

        Args:
            model: Model that has them.
        """
        everywhere = [alias for entry in self._ledger if entry.kind == "param" for alias in entry.aliases]
        sharded = self._sharded  # which exchanges parameters by itself
        gathered_of = sharded.gathered_of if sharded is not None else (lambda parameter: None)
        self._guard = WeightGuard(model, self._parameters, everywhere, gathered_of)
        if sharded is not None:  # which puts its own parameters into the modules before a forward pass begins
            model.register_forward_pre_hook(self._before_gathering, prepend=True)

    def begin_forward(self) -> None:
        """Check them before the first forward pass of a step: what is replaced later is noticed before the update.

        Raises:
            UnsupportedError: Names a parameter or a module that was replaced.
        """
        if not self._in_window():
            self.check()

    def check(self) -> None:
        """Check them, and their shapes.

        Raises:
            UnsupportedError: Names a parameter or a module that was replaced, or has another shape.
        """
        if self._guard is not None:
            self._guard.check()

    def check_objects(self) -> None:
        """Check that they are the same objects.

        Raises:
            UnsupportedError: Names a parameter or a module that was replaced.
        """
        if self._guard is not None:
            self._guard.check_objects()

    def _before_gathering(self, model: nn.Module, inputs: object) -> None:
        if model.training and torch.is_grad_enabled():
            self.begin_forward()
