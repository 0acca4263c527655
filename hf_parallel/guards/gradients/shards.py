"""Finds the shards of a model's parameters, and makes a whole tensor and its shards of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


class Shards:
    """Says which stage counts a parameter, and which ranks hold shards of it.

    Args:
        ledger: The model's ledger.
        names: Ledger names of this rank's parameters.
        mesh: This rank's mesh.
        waiting: Context for waits on other ranks.
    """

    def __init__(
        self, ledger: Ledger, names: Iterable[str], mesh: Mesh, waiting: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._ledger, self._mesh, self._waiting = ledger, mesh, waiting
        names = list(names)
        # Asked of every parameter in every step.
        self._owned = frozenset(name for name in names if ledger.entries[name].owner == mesh.pp_rank)
        shards = (name for name in names if ledger.entries[name].spec is not None)
        self._shards = frozenset(shards if mesh.parts.group is not None else ())

    def owns(self, name: str) -> bool:
        """Whether this rank's stage counts a parameter in the norm of the model."""
        return name in self._owned

    def is_shard(self, name: str) -> bool:
        """Whether ranks hold different shards of a parameter."""
        return name in self._shards

    def sharded_dim(self, name: str) -> int | None:
        """Along which dimension ranks hold shards of a parameter."""
        spec = self._ledger.entries[name].spec
        return spec.dim if spec is not None and self._mesh.parts.group is not None else None

    def full_size(self, name: str) -> int:
        """Extent of that dimension in the whole parameter; 0 of one that is not sharded."""
        spec = self._ledger.entries[name].spec
        return 0 if spec is None else spec.full_size

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor that is sharded as the parameter is."""
        spec = self._ledger.entries[name].spec
        return whole if spec is None else spec.shard(whole, self._mesh.parts.size, self._mesh.parts.rank)

    def assemble(self, name: str, local: Tensor) -> Tensor:
        """The whole of a tensor that is sharded as the parameter is; collective over the ranks with its shards."""
        spec, group = self._ledger.entries[name].spec, self._mesh.parts.group
        if spec is None or group is None:
            return local
        size = self._mesh.parts.size
        shards = []
        for rank in range(size):
            shape = list(local.shape)
            shape[spec.dim] = spec.local_size(size, rank)
            shards.append(local.contiguous() if rank == group.rank() else local.new_empty(shape))
        with self._waiting("waits for the other shards of a gradient that user code reads"):
            for rank, shard in enumerate(shards):
                dist.broadcast(shard, group=group, group_src=rank)
        return spec.assemble(shards)
