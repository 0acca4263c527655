"""How long messages take on a cluster: which ranks share a node and its links, rings and trees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from hf_parallel.planner.constants import Constants
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec


# Of a large message, from one rank of a ring to the next: inside a node and between nodes. Source: NCCL's src/graph/tuning.cc, hwLat of
# Ring/Simple.
HOP_S: Final = (3.4e-6, 14e-6)
LINK_BYTES_S: Final = 25e9  # of one network link where a node has fewer than GPUs; HDR InfiniBand


@dataclass(frozen=True)
class Group:
    """Ranks that a collective joins.

    Attributes:
        size: Number of ranks.
        on_node: Number of these ranks on one node.
    """

    size: int
    on_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.on_node)


def group_of(size: int, stride: int, cluster: Cluster) -> Group:
    """A group whose neighbours are `stride` ranks apart."""
    return Group(size, max(1, min(size, cluster.gpus_per_node // stride)))


def groups_of(spec: LayoutSpec, cluster: Cluster) -> dict[str, Group]:
    """The groups of each axis: tp ranks are neighbours, then sp, then so many replicas of a stage, its stages, other replicas.

    "dp" are the ranks that have copies of the same parameters, "ep" those that share the experts of a block, and "experts" those that
    have copies of the same experts.
    """
    copies = _copies_on_node(spec, cluster)
    return {
        "tp": group_of(spec.tp, 1, cluster),
        "sp": group_of(spec.sp, spec.tp, cluster),
        "dp": Group(spec.dp * spec.sp, copies),
        "ep": Group(spec.ep, min(spec.ep, copies * (spec.tp if spec.experts_over_tp else 1))),
        "experts": Group(spec.dp * spec.sp // spec.sharing_replicas, max(1, copies // spec.sharing_replicas)),
    }


def by_copies(parameters: float, experts: float, spec: LayoutSpec, cluster: Cluster) -> list[tuple[float, Group]]:
    """Parameters of a rank, dense ones and experts apart, each with the group of ranks that have copies of them.

    Args:
        parameters: Parameters of the rank.
        experts: Parameters of the rank that belong to experts.
        spec: The layout.
        cluster: The machines.
    """
    groups = groups_of(spec, cluster)
    if spec.sharing_replicas == 1:
        return [(parameters, groups["dp"])]
    return [(parameters - experts, groups["dp"]), (experts, groups["experts"])]


def _copies_on_node(spec: LayoutSpec, cluster: Cluster) -> int:
    """Number of copies of a stage's parameters on one node, where ranks of a sequence hold copies too."""
    copies = spec.neighbours * spec.sp
    stage = spec.tp * copies  # ranks that are neighbours
    if cluster.gpus_per_node <= stage:
        return max(1, cluster.gpus_per_node // spec.tp)
    return min(spec.dp * spec.sp, copies * max(1, cluster.gpus_per_node // (stage * spec.pp)))


def orders_of(spec: LayoutSpec, cluster: Cluster) -> tuple[int, ...]:
    """Numbers of neighbours among which a layout has a choice: a replica's stages side by side, or a stage's replicas on a node."""
    if spec.dp_inside or spec.ep > 1 or not spec.places_replicas or 1 in (spec.pp, spec.dp, cluster.nodes):
        return (spec.dp_inside,)
    return tuple(sorted({1, math.gcd(spec.dp, max(1, cluster.gpus_per_node // (spec.tp * spec.sp)))}))


def bytes_s(group: Group, cluster: Cluster, c: Constants) -> float:
    """Bytes per second that one rank sends in a group; the groups of a node share its network."""
    inside = cluster.intra_bytes_s * c.c_intra
    if group.nodes == 1:
        return inside
    shared = cluster.inter_bytes_s * c.c_inter * group.on_node / cluster.gpus_per_node
    return min(inside, shared / (1 + c.congestion * math.log2(group.nodes)))


def one_way(size: float, group: Group, cluster: Cluster, c: Constants) -> float:
    """Seconds of an all-gather or reduce-scatter whose whole is `size` bytes, in a ring."""
    n = group.size
    if n <= 1:
        return 0.0
    return (n - 1) / n * size / bytes_s(group, cluster, c) + _ring_latency(group, c)


def all_reduce(size: float, group: Group, cluster: Cluster, c: Constants) -> float:
    """Seconds of an all-reduce of `size` bytes: a ring, or a tree between nodes where that is quicker."""
    n = group.size
    if n <= 1:
        return 0.0
    rate = bytes_s(group, cluster, c)
    ring = 2 * ((n - 1) / n * size / rate + _ring_latency(group, c))
    if group.nodes == 1:
        return ring
    tree = 2 * size / rate + 2 * math.log2(group.nodes) * c.a_inter + 2 * c.a_intra * group.on_node
    return min(ring, tree)


def sum_in_nodes(size: float, group: Group, cluster: Cluster, c: Constants) -> float:
    """Seconds of an all-reduce of `size` bytes that is made inside each node first, and of a part by each rank between nodes."""
    if 1 in (group.nodes, group.on_node) or group.size % group.on_node:
        return all_reduce(size, group, cluster, c)
    between = 2 * ((group.nodes - 1) / group.nodes * size / bytes_s(group, cluster, c) + c.a_inter * (group.nodes - 1))
    return all_reduce(size, Group(group.on_node, group.on_node), cluster, c) + between


def to_owners(size: float, tensors: int, group: Group, cluster: Cluster, c: Constants) -> float:
    """Seconds of sums to the ranks that own one or more whole tensors each, or of broadcasts from them, one message an owner.

    Each message passes all other ranks, one after the other.
    """
    if group.size <= 1:
        return 0.0
    inside = group.size - group.nodes if group.nodes > 1 else group.size - 1
    passed = HOP_S[0] * inside + HOP_S[1] * (group.nodes if group.nodes > 1 else 0)
    return size / bytes_s(group, cluster, c) + min(tensors, group.size) * passed


def all_to_all(size: float, group: Group, cluster: Cluster, c: Constants) -> float:
    """Seconds of an all-to-all in which each rank holds `size` bytes: as much travels as in a ring over them."""
    return one_way(size, group, cluster, c)


def _ring_latency(group: Group, c: Constants) -> float:
    if group.nodes == 1:
        return c.a_intra * (group.size - 1)
    return c.a_inter * (group.nodes - 1) + c.a_intra * (group.size - group.nodes) / 4


def stays_on_node(spec: LayoutSpec, cluster: Cluster) -> bool:
    """Whether no stage sends to another node."""
    if spec.places_replicas:
        return cluster.nodes == 1 or cluster.gpus_per_node % (spec.tp * spec.neighbours * spec.pp) == 0
    return 2 * spec.tp * spec.sp * spec.dp <= cluster.gpus_per_node


def senders(spec: LayoutSpec, cluster: Cluster) -> int:
    """Ranks of a node that send to the next stage on another node at once."""
    return min(spec.tp * spec.neighbours, cluster.gpus_per_node)


def hop(size: float, spec: LayoutSpec, cluster: Cluster, c: Constants) -> float:
    """Seconds of the slowest message of `size` bytes to the next stage.

    Where stages number last all ranks of a node send at once. In this package those of one stage do, each over one link at most.
    """
    if stays_on_node(spec, cluster):
        return size / (cluster.intra_bytes_s * c.c_intra) + c.a_intra
    rate = cluster.inter_bytes_s / cluster.gpus_per_node
    if spec.places_replicas:
        rate = min(cluster.inter_bytes_s / senders(spec, cluster), max(rate, LINK_BYTES_S))
    return size / (rate * c.c_inter) + c.a_inter
