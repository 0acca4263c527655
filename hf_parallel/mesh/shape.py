"""Positions of ranks: the sizes of the axes dp, pp, sp, tp, and the coordinates of any rank on them; arithmetic only.

Ranks that share layers or a sequence are neighbours: tp is innermost, then sp. Around these, `dp_inside` replicas of a stage
follow each other, then the stages, then the other replicas:

    rank = (((dp_rank // dp_inside * pp_size + pp_rank) * dp_inside + dp_rank % dp_inside) * sp_size + sp_rank) * tp_size + tp_rank

With one replica inside, the ranks that run one batch (mp = pp x sp x tp) are contiguous; with all inside, the replicas of a
stage are. In both, the ranks of any group ascend with their coordinates, so a place in a group says nothing of `dp_inside`.

With experts on several replicas (ep), `ep_size` neighbours on the dp axis share the experts of their stage: each reads its own
rows, and together they hold one copy of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes.

    Args:
        dp_size: Data-parallel replicas.
        pp_size: Ranks of a pipeline; each holds one stage or several.
        tp_size: Tensor-parallel ranks that share each stage.
        sp_size: Ranks that share the sequence of each row; each holds the weights of all.
        ep_size: Neighbouring replicas that share the experts of their stage; divides `dp_size`.
        dp_inside: Replicas of a stage that are neighbours; divides `dp_size`.
        hosts: Name of the machine of each rank, if there are several; only for messages.
    """

    dp_size: int
    pp_size: int
    tp_size: int
    sp_size: int = 1
    ep_size: int = field(default=1, compare=False)  # it changes no rank's place
    dp_inside: int = 1
    hosts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks on the mesh."""
        return self.dp_size * self.mp_size

    @property
    def mp_size(self) -> int:
        """Ranks that read the same batch: those that hold one copy of the model, once for each part of the sequence."""
        return self.pp_size * self.sp_size * self.tp_size

    @property
    def copy_size(self) -> int:
        """Ranks that together hold one copy of the model, whatever they read."""
        return self.pp_size * self.tp_size * self.ep_size

    @property
    def parts_size(self) -> int:
        """Ranks over which a sharded parameter is spread: those of tp, or those that share the experts."""
        return self.ep_size if self.ep_size > 1 else self.tp_size

    @property
    def sharded_by(self) -> str:
        """The setting that shards parameters, for messages."""
        return "ep_size" if self.ep_size > 1 else "tp_size"

    def holder(self, pp_rank: int, part: int) -> int:
        """World rank, in the first copy of the model, of a part of what `pp_rank` holds."""
        return self.rank_at(part, pp_rank, 0) if self.ep_size > 1 else self.rank_at(0, pp_rank, part)

    @property
    def stage_size(self) -> int:
        """Ranks of one stage that read the same batch; neighbours."""
        return self.sp_size * self.tp_size

    @property
    def num_copies(self) -> int:
        """Copies of the model's weights: of each replica, one for each part of the sequence."""
        return self.dp_size * self.sp_size

    def orders(self) -> list[MeshShape]:
        """The mesh with each number of neighbouring replicas that may be chosen; one without stages, or with shared experts."""
        may_be = range(1, self.dp_size + 1) if self.pp_size > 1 and self.ep_size == 1 else (1,)
        return [replace(self, dp_inside=count) for count in may_be if self.dp_size % count == 0]

    def copies_in_nodes(self, ranks_per_node: int) -> int:
        """Copies of each part on every node that has one, if several nodes have the same part, and as many each; else 1."""
        counts: dict[tuple[int, ...], int] = {}
        for rank in range(self.world_size):
            _, pp_rank, tp_rank, _ = self.coordinates(rank)
            key = rank // ranks_per_node, pp_rank, tp_rank
            counts[key] = counts.get(key, 0) + 1
        alike = len(set(counts.values())) == 1 and len(counts) > self.pp_size * self.tp_size
        return next(iter(counts.values())) if alike else 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, as files have them; of a sequence that is not shared and of replicas outside nothing is said."""
        more = {"sp_size": self.sp_size, "dp_inside": self.dp_inside}
        named = {"dp_size": self.dp_size, "pp_size": self.pp_size, "tp_size": self.tp_size}
        return named | {name: size for name, size in more.items() if size > 1}

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(dp_rank, pp_rank, tp_rank, sp_rank) of `rank`."""
        outside, inside = divmod(rank, self.mp_size * self.dp_inside)
        pp_rank, inside = divmod(inside, self.stage_size * self.dp_inside)
        dp_rank, inside = divmod(inside, self.stage_size)
        sp_rank, tp_rank = divmod(inside, self.tp_size)
        return outside * self.dp_inside + dp_rank, pp_rank, tp_rank, sp_rank

    def rank_at(self, dp_rank: int, pp_rank: int, tp_rank: int, sp_rank: int = 0) -> int:
        """World rank at the given coordinates."""
        outside, inside = divmod(dp_rank, self.dp_inside)
        stage = (outside * self.pp_size + pp_rank) * self.dp_inside + inside
        return stage * self.stage_size + sp_rank * self.tp_size + tp_rank

    def ranks_of_copy(self, dp_rank: int) -> list[int]:
        """The ranks that read the batch of a replica, ascending."""
        places = product(range(self.pp_size), range(self.sp_size), range(self.tp_size))
        return [self.rank_at(dp_rank, pp_rank, tp_rank, sp_rank) for pp_rank, sp_rank, tp_rank in places]

    def describe(self, rank: int) -> str:
        """Text such as `rank 3 (pp 1 of 2, tp 1 of 2) on nodeb`; axes of size 1 and the only machine are left out."""
        dp_rank, pp_rank, tp_rank, sp_rank = self.coordinates(rank)
        parts = [
            f"{name} {index} of {size}"
            for name, index, size in (
                ("pp", pp_rank, self.pp_size),
                ("tp", tp_rank, self.tp_size),
                ("sp", sp_rank, self.sp_size),
                ("dp", dp_rank, self.dp_size),
            )
            if size > 1
        ]
        place = f" on {self.hosts[rank]}" if self.hosts else ""
        return (f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}") + place

    def axes_of(self, ranks: Sequence[int]) -> str:
        """The axes along which a group of ranks differs, such as `pp, dp`; empty for one rank or none."""
        places = [self.coordinates(rank) for rank in ranks if rank < self.world_size]
        axes = zip(("dp", "pp", "tp", "sp"), zip(*places, strict=True), strict=False)
        return ", ".join(axis for axis, coordinates in axes if len(set(coordinates)) > 1)

    def groups(self, key: Callable[[int, int, int, int], tuple[int, ...]]) -> list[list[int]]:
        """Partition all ranks by `key(dp_rank, pp_rank, tp_rank, sp_rank)`; each group in ascending rank order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(key(*self.coordinates(rank)), []).append(rank)
        return list(groups.values())
