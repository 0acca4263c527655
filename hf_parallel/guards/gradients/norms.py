"""Norms of gradients that user code sees: each rank counts what it has, and the ranks sum it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.private_clipping import clips_one
from hf_parallel.data_parallel.norms import power_sum
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.numbers import NumbersOfShards
from hf_parallel.guards.gradients.parts import CountRule
from hf_parallel.guards.gradients.shards import Shards
from hf_parallel.guards.gradients.shown import refuse_part, root
from hf_parallel.mesh.groups import Mesh


class NormsOfShown:
    """Base: what ranks count of gradients, and its sum over the ranks that have the rest of them.

    Args:
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        counted: Chooses the elements of a parameter that this rank counts, whichever stage owns it.
        shards: Sharding of the parameters.
        waiting: Context for waits on other ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        counted: CountRule,
        shards: Shards,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._parameters, self._mesh, self._waiting = parameters, mesh, waiting
        self.counted, self.shards = counted, shards
        self.numbers = NumbersOfShards(mesh)

    def _parts(self) -> ZeroPartition | None:
        """Has the gradients that are in parts now; None if none are."""
        raise NotImplementedError

    def power(self, name: str, parameter: nn.Parameter, gradient: Tensor, norm_type: float) -> Tensor:
        """This rank's summand in the norm's sum of powers, for a gradient that is not partitioned."""
        counted = self.counted(name, parameter)
        values = gradient * counted if isinstance(counted, Tensor) else gradient
        counts = self.is_first(name) and counted is not False
        return power_sum([values] if counts else [], norm_type, parameter.device)

    def is_first(self, name: str) -> bool:
        """Whether this rank is the one, of those over which powers are summed, that counts what several have of a gradient."""
        is_expert, parts = self.shards.is_shard(name) and self._mesh.shape.ep_size > 1, self._parts()
        if parts is None:
            return is_expert or self._mesh.ep_rank == 0
        return parts.shard_group.rank() < (self._mesh.shape.ep_size if is_expert else 1)

    def own(self, powers: Tensor, norm_type: float) -> Tensor:
        """Norms of single gradients from what ranks count of them; collective."""
        groups, operation = self._groups(alone=True), _operation(norm_type)
        shares = self._mesh.parts.group
        if shares is None or not powers.is_cpu or groups[-1] is not shares:
            return root(self._summed(powers.clone(), groups, norm_type), norm_type)
        summed = self._summed(powers.clone(), groups[:-1], norm_type)
        together = self._summed(self.numbers.beside(summed, operation), [shares], norm_type)
        return root(self.numbers.compared(together), norm_type)

    def total(self, powers: Tensor, owned: Mapping[str, bool], norm_type: float) -> Tensor:
        """Norm over several gradients, over the stages too if they are all of this one; collective."""
        present = sum(parameter.grad is not None for parameter in self._parameters.values())
        staged = self._mesh.shape.pp_size > 1
        alone = staged and len(owned) == 1 and (present > 1 or self._clips_one(next(iter(owned))))
        if staged and not alone and len(owned) != present:
            refuse_part(list(owned), present, self._mesh.shape.pp_size)
        if not alone:
            powers = powers * torch.tensor(list(owned.values()), dtype=powers.dtype, device=powers.device)
        together = powers.max() if math.isinf(norm_type) else powers.sum()
        return root(self._summed(together, self._groups(alone=alone), norm_type), norm_type)

    def norm_of_nothing(self, norm_type: float) -> Tensor | None:
        """The norm over all gradients of the model on a stage that has none; None where that is not so. Collective."""
        is_staged = self._mesh.shape.pp_size > 1
        if not is_staged or any(parameter.grad is not None for parameter in self._parameters.values()):
            return None
        nothing = power_sum([], norm_type, next(iter(self._parameters.values())).device)
        return root(self._summed(nothing, self._groups(alone=False), norm_type), norm_type).float()

    def _clips_one(self, name: str) -> bool:
        """Whether the norm of the only gradient of this stage is asked for by itself, and not as its part of the model's.

        Raises:
            UnsupportedError: The call does not tell.
        """
        found = clips_one()
        if found is None:
            raise UnsupportedError(
                f"a list of one gradient is clipped, and {name} is the only one of this stage, with "
                f"pp_size={self._mesh.shape.pp_size}: it cannot be told whether its own norm is meant or that of the gradients of all "
                "stages. Give torch.nn.utils.clip_grad_norm_ the parameter by itself, or model.parameters()."
            )
        return found

    def _groups(self, *, alone: bool) -> list[dist.ProcessGroup | None]:
        """The groups over which powers are summed, for the whole model or for what this rank's stage has."""
        mesh, parts = self._mesh, self._parts()
        if parts is None:
            return [mesh.parts.group if alone else mesh.model_group]
        # Replicas that share experts are among those that share the optimizer.
        whole = mesh.model_group if mesh.ep_group is None else mesh.mp_group
        return [parts.shard_group, mesh.tp_group if alone else whole]

    def _summed(self, powers: Tensor, groups: Sequence[dist.ProcessGroup | None], norm_type: float) -> Tensor:
        operation = _operation(norm_type)
        with self._waiting("waits for the gradient norm of the other ranks"):
            for group in groups:
                if group is not None:
                    dist.all_reduce(powers, op=operation, group=group)
        return powers


def _operation(norm_type: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
