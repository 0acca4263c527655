"""The norm of the full model's gradient, of which each rank has a part: every element counts once, whatever the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_collectives import rows_of_ranks
from hf_parallel.data_parallel.norms import power_sum
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.engine.gradients.counted import Counted
from hf_parallel.engine.gradients.told import SPREAD, ToldOverParts
from hf_parallel.guards.gradients.norms import NormsOfShown
from hf_parallel.mesh.groups import Mesh


class GlobalNorm:
    """Norms over the ranks of a model copy.

    Args:
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        counted: What this rank counts of them.
        replicas: Has the gradients of the optimizer's parts.
        told: Travels with the sums over replicas.
        shown: Knows what this rank counts that several ranks have.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        counted: Counted,
        replicas: Replicas,
        told: ToldOverParts,
        shown: NormsOfShown,
    ) -> None:
        self._parameters, self._mesh, self._counted = parameters, mesh, counted
        self._replicas, self._told, self._shown = replicas, told, shown
        self._times_told = 0
        # Optimizer -> how often, until its last step.
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._foreseen: Tensor | None = None  # sum of the squares of all gradients, before anybody has seen them

    def foresee(self, power: Tensor | None) -> None:
        """The next 2-norm is known, of gradients that no code of users has seen.

        Args:
            power: Sum of the squares of all gradients of the model (0-d, float64); None if it is not known.
        """
        self._foreseen = power

    def scale_foreseen(self, factor: float) -> None:
        """All gradients are multiplied by a factor."""
        if self._foreseen is not None:
            self._foreseen = self._foreseen * factor**2

    def of(self, norm_type: float) -> Tensor:
        """The norm (0-d, float32), equal on every rank of a model copy; collective over it.

        Args:
            norm_type: p of the p-norm, above 0; `inf` for the largest magnitude.
        """
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and norm_type == 2.0:
            return foreseen.sqrt().float()
        infinite = norm_type == float("inf")
        total = self.power_of(self._beside_parts(), norm_type)
        if self._replicas.zero is not None:
            parts = self.power_of(self._replicas.zero.gradients(), norm_type)
            # A gradient that is not in parts is counted by one of the ranks that share the optimizer.
            total = torch.maximum(total, parts) if infinite else total + parts
        total = self._summed(total, infinite=infinite)
        return (total if infinite else total.pow(1.0 / norm_type)).float()

    def tell_before(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: what travels with a norm is told without one, if there was none since its last step."""
        if self.has_parts and self._steps.get(optimizer, 0) == self._times_told:
            self._summed(self.power_of([], 2.0), infinite=False)
        self._steps[optimizer] = self._times_told

    @property
    def has_parts(self) -> bool:
        """Whether replicas share an optimizer."""
        return self._replicas.zero is not None or self._replicas.sharded is not None

    def _summed(self, total: Tensor, *, infinite: bool) -> Tensor:
        """Sum of the counts of a model copy's ranks (0-d, f64), after they have told each other what else they must."""
        self._times_told += 1
        told, group = None, self._mesh.model_group
        if self.has_parts:
            total, told = self._told.sum(total, infinite=infinite)
        if self._replicas.zero is not None and self._mesh.shape.ep_size > 1:
            group = self._mesh.mp_group  # the replicas that share experts share the optimizer too
        if group is not None:
            mine = total.view(1) if told is None else torch.cat([total.view(1), told[-SPREAD:]])
            rows = rows_of_ranks(mine, group)
            total = rows[:, 0].amax() if infinite else rows[:, 0].sum()
            if told is not None:
                told[-SPREAD:] = rows[:, 1:].amax(0)
        if told is not None:
            self._told.give(told)
        return total

    def power_of(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        """Sum of the magnitudes to the power of `norm_type`, or the largest (0-d, float64)."""
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        if self._replicas.sharded is not None:
            device = self._replicas.sharded.device  # sums travel from there, wherever the parts are
        return power_sum(gradients, norm_type, device)

    def _beside_parts(self) -> list[Tensor]:
        """Count of this rank of the gradients that are not partitioned."""
        shown, parameters = self._shown, self._parameters.items()
        return [g for n, p in parameters if shown.is_first(n) for g in self._counted.gradients(n, p)]
