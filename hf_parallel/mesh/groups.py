"""The process groups of this rank along the axes of the mesh, whose ranks `shape` numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from hf_parallel.errors import ConfigError
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.shape import MeshShape


@dataclass(frozen=True)
class Parts:
    """The ranks over which the sharded parameters of a stage are spread, seen from one of them.

    Args:
        size: Number of ranks.
        rank: This rank's place.
        group: None with one rank.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """The mesh seen from one rank. A group is None where its axis has size 1: nothing to communicate.

    The ranks of `copies_group` hold the same weights (dp x sp: without sp it is `dp_group`); gradients are summed over it.
    Those of `dp_shard_group` share one copy of what ZeRO partitions; `dp_replicate_group` joins those with the same part of
    it. `mp_group` reads one batch, and the part of it in `model_group` (pp x tp) holds the model once. The replicas of
    `ep_group` share the experts of their stage, so that `model_group` has several replicas; `expert_group` joins those with the same
    experts.
    """

    shape: MeshShape
    rank: int
    timeout: timedelta
    links: Links
    tp_group: dist.ProcessGroup | None = None
    sp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    copies_group: dist.ProcessGroup | None = None
    dp_shard_group: dist.ProcessGroup | None = None
    dp_replicate_group: dist.ProcessGroup | None = None
    mp_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    expert_group: dist.ProcessGroup | None = None

    @classmethod
    def build(
        cls,
        shape: MeshShape,
        *,
        timeout: timedelta,
        dp_shard_size: int | None = None,
        links: Links | None = None,
        parts_alone: bool = False,
    ) -> Mesh:
        """Create this rank's groups; collective over the default group.

        Args:
            shape: Must cover exactly the default group's world size.
            timeout: Longest wait of a collective before it raises.
            dp_shard_size: Replicas that share one copy of partitioned state, neighbours on the dp axis; None for all.
            links: Links that join the ranks; None: all are alike.
            parts_alone: Whether a rank that is alone has a `dp_shard_group`, the default group: what is offloaded is then its part.

        Raises:
            ConfigError: `shape` does not fit the world size, or `dp_shard_size` does not divide the replicas.
        """
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        shard_size = shape.dp_size if dp_shard_size is None else dp_shard_size
        _refuse_sizes(shape, shard_size, world_size)

        def group(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
            return new_group_of(lists, timeout=timeout)

        dp_group = group(shape.groups(lambda d, p, t, s: (p, t, s)))
        mp_group = group(shape.groups(lambda d, p, t, s: (d,)))
        is_shared = shape.sp_size > 1
        copies_group = group(shape.groups(lambda d, p, t, s: (p, t))) if is_shared else dp_group
        model_group = group(shape.groups(lambda d, p, t, s: (d, s))) if is_shared else mp_group
        whole = shard_size == shape.dp_size
        sharers = copies_group if whole else group(shape.groups(lambda d, p, t, s: (d // shard_size, p, t)))
        return cls(
            shape=shape,
            rank=rank,
            links=links or Links(1, world_size, world_size),
            tp_group=group(shape.groups(lambda d, p, t, s: (d, p, s))),
            sp_group=group(shape.groups(lambda d, p, t, s: (d, p, t))) if is_shared else None,
            pp_group=group(shape.groups(lambda d, p, t, s: (d, t, s))),
            dp_group=dp_group,
            copies_group=copies_group,
            dp_shard_group=dist.group.WORLD if parts_alone and world_size == 1 else sharers,
            dp_replicate_group=None if whole else group(shape.groups(lambda d, p, t, s: (d % shard_size, p, t, s))),
            mp_group=mp_group,
            timeout=timeout,
            **({"model_group": model_group} | _expert_groups(shape, group)),
        )

    @property
    def dp_rank(self) -> int:
        """Index of this rank's replica: of the rows that it reads."""
        return self.shape.coordinates(self.rank)[0]

    @property
    def pp_rank(self) -> int:
        """This rank's place in its pipeline; with one stage a rank, the index of its stage."""
        return self.shape.coordinates(self.rank)[1]

    @property
    def tp_rank(self) -> int:
        """Index of this rank's shard inside its stage."""
        return self.shape.coordinates(self.rank)[2]

    @property
    def ep_rank(self) -> int:
        """Index of this rank's experts among those of its stage."""
        return self.dp_rank % self.shape.ep_size

    @property
    def parts(self) -> Parts:
        """The ranks over which sharded parameters are spread: those of tp, or those that share the experts."""
        if self.shape.ep_size > 1:
            return Parts(self.shape.ep_size, self.ep_rank, self.ep_group)
        return Parts(self.shape.tp_size, self.tp_rank, self.tp_group)

    @property
    def parts_ranks(self) -> list[int]:
        """The ranks of `parts`."""
        shape, own = self.shape, (self.pp_rank, self.tp_rank, self.sp_rank)
        if shape.ep_size > 1:
            first = self.dp_rank - self.ep_rank
            return [shape.rank_at(first + index, *own) for index in range(shape.ep_size)]
        return [shape.rank_at(self.dp_rank, self.pp_rank, index, self.sp_rank) for index in range(shape.tp_size)]

    @property
    def sp_rank(self) -> int:
        """Index of the part of each row that this rank has."""
        return self.shape.coordinates(self.rank)[3]

    @cached_property
    def copy_ranks(self) -> list[int]:
        """The ranks that read this rank's batch, in the order of `mp_group`."""
        return self.shape.ranks_of_copy(self.dp_rank)

    @cached_property
    def place_in_copy(self) -> int:
        """This rank's place in `mp_group`."""
        return self.copy_ranks.index(self.rank)

    @property
    def copy_rank(self) -> int:
        """Index of this rank's copy of the weights, its place in `copies_group`."""
        return self.dp_rank * self.shape.sp_size + self.sp_rank

    def channel_groups(
        self, pairs: Sequence[tuple[int, int]], backend: str | None = None
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """A group of two ranks for each direction between pipeline neighbours, of those that this rank is in.

        NCCL runs the operations of a communicator one after another. With a communicator for each direction of each pair,
        only messages of one sender to one receiver follow each other, and those have the schedule's order on both sides.

        Collective: every rank must call it with the same `pairs`.

        Args:
            pairs: (source, target) ranks of the pipeline, in ascending order.
            backend: None for the default group's; `"gloo"` lets CUDA tensors travel through host memory.
        """
        groups = {pair: self.holders_group(pair, backend) for pair in pairs}
        return {pair: group for pair, group in groups.items() if group is not None}

    def holders_group(self, pp_ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """Group of the pipeline ranks `pp_ranks` at this rank's (dp, tp, sp); None on other ranks.

        Collective: every rank must call it with the same `pp_ranks`, in the same order of calls. `backend` is that of the
        group; None for the default group's.
        """
        wanted = set(pp_ranks)
        lists = self.shape.groups(lambda d, p, t, s: (d, t, s) if p in wanted else (-1, d, p, t, s))
        return new_group_of(lists, timeout=self.timeout, backend=backend)

    @cached_property
    def host_group(self) -> dist.ProcessGroup | None:
        """All ranks, for tensors on the CPU: what NCCL carries takes memory of the GPU and a communicator for each pair.

        The default group where it takes such tensors; None without one. The first use is collective.
        """
        world = dist.group.WORLD
        if world is None or backend_for(world, "cpu") in ("gloo", "mpi"):
            return world
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self.timeout)
        return group

    def replica_group(self) -> dist.ProcessGroup | None:
        """Another group of the same ranks as `dp_group`; None without replicas. Collective."""
        return new_group_of(self.shape.groups(lambda d, p, t, s: (p, t, s)), timeout=self.timeout)

    def node_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
        """Groups of the copies of a part on this rank's node, and of those with its place on the other nodes. Collective.

        Returns:
            None unless several nodes have the same part, and as many copies of it each, two or more.
        """
        ranks_per_node = self.links.ranks_per_node
        if self.shape.copies_in_nodes(ranks_per_node) == 1:
            return None
        inside = self.shape.groups(lambda d, p, t, s: (self.shape.rank_at(d, p, t, s) // ranks_per_node, p, t))
        place = {rank: ranks.index(rank) for ranks in inside for rank in ranks}
        across = self.shape.groups(lambda d, p, t, s: (place[self.shape.rank_at(d, p, t, s)], p, t))
        groups = [new_group_of(lists, timeout=self.timeout) for lists in (inside, across)]
        return None if groups[0] is None or groups[1] is None else (groups[0], groups[1])

    def describe(self) -> str:
        """This rank in words, for messages."""
        return self.shape.describe(self.rank)


def _refuse_sizes(shape: MeshShape, dp_shard_size: int, world_size: int) -> None:
    """Refuse sizes whose product is not the number of processes, or that do not divide the replicas."""
    if shape.world_size != world_size:
        sequence = f" x sp {shape.sp_size}" if shape.sp_size > 1 else ""
        raise ConfigError(
            f"dp {shape.dp_size} x pp {shape.pp_size} x tp {shape.tp_size}{sequence} needs {shape.world_size} processes, "
            f"but {world_size} run. Launch {shape.world_size} processes or change tp_size and pp_size."
        )
    if shape.dp_size % shape.ep_size:
        raise ConfigError(
            f"ep_size={shape.ep_size} does not divide the {shape.dp_size} replicas. Set it to a divisor of {shape.dp_size}."
        )
    if shape.dp_size % dp_shard_size:
        raise ConfigError(
            f"zero.dp_shard_size={dp_shard_size} does not divide the {shape.dp_size} replicas. Set it to a divisor of "
            f"{shape.dp_size}, or to 'auto'."
        )


def _expert_groups(
    shape: MeshShape, group: Callable[[Sequence[Sequence[int]]], dist.ProcessGroup | None]
) -> dict[str, dist.ProcessGroup | None]:
    """The groups of ranks that share experts, of those that have the same ones, and of those that hold one copy."""
    size = shape.ep_size
    if size == 1:
        return {}
    ep_group = group(shape.groups(lambda d, p, t, s: (d // size, p, t)))
    return {
        "ep_group": ep_group,
        "expert_group": group(shape.groups(lambda d, p, t, s: (d % size, p, t))),
        "model_group": ep_group if shape.mp_size == 1 else group(shape.groups(lambda d, p, t, s: (d // size,))),
    }


def new_group_of(
    lists: Sequence[Sequence[int]], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create one group per list of ranks (collective) and return the one this rank is in; None for lists of one."""
    mine = None
    rank = dist.get_rank() if dist.is_initialized() else 0
    for ranks in lists:
        if len(ranks) < 2:
            continue
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if rank in ranks:
            mine = group
    return mine


def backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that `group` uses for tensors of `device_type`, or "" if it has none."""
    # The config reads "cpu:gloo,cuda:nccl"; a single-backend group lists that backend for every device it takes.
    for entry in dist.get_backend_config(group).split(","):
        device, _, backend = entry.rpartition(":")
        if device in ("", device_type):
            return backend
    return ""
