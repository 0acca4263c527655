"""Lays the axes of a mesh on links: counts what each kind carries in a step, and orders axes to spare the slowest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from hf_parallel.mesh.links import FAST, NETWORK, NODE, Links
from hf_parallel.mesh.shape import MeshShape


KINDS = (NETWORK, NODE, FAST)  # the slowest first
Flow = tuple[int, int, float]  # sender, receiver, bytes
Sent = Mapping[str, "float | Sequence[float]"]


@dataclass(frozen=True)
class Placement:
    """A mesh on links.

    Args:
        shape: The mesh.
        links: Links that join its ranks.
        sums_in_nodes: Whether gradients are summed inside a node first.
        sent: Axis -> bytes that a rank sends along it in an optimizer step, or those for each rank of a pipeline; of "pp" those to its
            neighbours, of "experts" those of sums of experts that ranks share, and "ends" those that the first and the last rank of a
            pipeline send to each other. None: not known.
    """

    shape: MeshShape
    links: Links
    sums_in_nodes: bool
    sent: Sent | None

    def carried(self, axis: str, sent: float | None = None) -> dict[str, float]:
        """Kind of link -> bytes of a step along an axis, out of the busiest end of a link.

        Kinds that carry nothing are left out.

        Args:
            axis: "tp", "sp", "ep", "pp" or "dp", which has the sums of experts.
            sent: Bytes that each rank sends; None takes what is known.
        """
        return _busiest(self._out_of_ends(axis, sent))

    @property
    def cost(self) -> tuple[float, ...]:
        """Bytes that the busiest end of each kind of link sends for all axes, the slowest kind first: the smaller, the better."""
        totals: dict[tuple[str, int], float] = {}
        for axis in ("tp", "sp", "ep", "pp", "dp"):  # which may be busiest on different nodes
            for end, size in self._out_of_ends(axis, None).items():
                totals[end] = totals.get(end, 0.0) + size
        found = _busiest(totals)
        return tuple(found.get(kind, 0.0) for kind in KINDS)

    def _out_of_ends(self, axis: str, sent: float | None) -> dict[tuple[str, int], float]:
        """Kind of link and end of one -> bytes along an axis out of it."""
        totals: dict[tuple[str, int], float] = {}
        for own in ("dp", "experts") if axis == "dp" and self.shape.ep_size > 1 else (axis,):
            for group in self._groups(own):
                each = self._sent(own, group[0]) if sent is None else sent
                for sender, receiver, size in self._flows(own, group, each):
                    kind = self.links.between(sender, receiver)
                    end = kind, self.links.end_of(sender, kind)
                    totals[end] = totals.get(end, 0.0) + size
        return totals

    def _sent(self, axis: str, rank: int) -> float:
        """Bytes that a rank sends along an axis."""
        each = (self.sent or {}).get(axis, 0.0)
        return each if isinstance(each, (int, float)) else each[self.shape.coordinates(rank)[1]]

    def _groups(self, axis: str) -> list[list[int]]:
        keys = {
            "tp": lambda d, p, t, s: (d, p, s),
            "sp": lambda d, p, t, s: (d, p, t),
            "pp": lambda d, p, t, s: (d, t, s),
            "dp": lambda d, p, t, s: (p, t),  # the parts of a sequence hold the same weights
            "ep": lambda d, p, t, s: (d // self.shape.ep_size, p, t, s),
            "experts": lambda d, p, t, s: (d % self.shape.ep_size, p, t),
        }
        return [group for group in self.shape.groups(keys[axis]) if len(group) > 1]

    def _flows(self, axis: str, group: Sequence[int], sent: float) -> Iterator[Flow]:
        """Sender, receiver and bytes of every message of a group along an axis."""
        if axis == "pp":  # results forward, gradients backward
            for one, after in pairwise(group):
                yield one, after, sent / 2
                yield after, one, sent / 2
            ends = self._sent("ends", group[0])
            yield from ((group[0], group[-1], ends), (group[-1], group[0], ends)) if ends else ()
        elif axis in ("sp", "ep"):
            for one, other in permutations(group, 2):
                yield one, other, sent / (len(group) - 1)
        elif axis in ("dp", "experts") and self.sums_in_nodes:
            yield from self._in_nodes(group, sent)
        else:
            yield from _ring(group, sent)

    def _in_nodes(self, group: Sequence[int], sent: float) -> Iterator[Flow]:
        """A sum inside each node in a ring, and that of the parts between nodes."""
        whole = sent * len(group) / (len(group) - 1)  # what a ring of endless length would send
        nodes: dict[int, list[int]] = {}
        for rank in group:
            nodes.setdefault(rank // self.links.ranks_per_node, []).append(rank)
        size = len(next(iter(nodes.values())))
        for inside in nodes.values():
            yield from _ring(inside, whole * (size - 1) / size)
        for across in zip(*nodes.values(), strict=True):
            yield from _ring(across, whole / size * (len(across) - 1) / len(across))


def _busiest(totals: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Kind of link -> the most that an end of one sends, the slowest kind first."""
    found: dict[str, float] = {}
    for (kind, _), size in totals.items():
        found[kind] = max(found.get(kind, 0.0), size)
    return {kind: found[kind] for kind in KINDS if kind in found}


def _ring(group: Sequence[int], sent: float) -> Iterator[Flow]:
    """Each sends to the next."""
    if len(group) > 1:
        for one, after in pairwise([*group, group[0]]):
            yield one, after, sent


def place(
    shape: MeshShape,
    links: Links,
    sent: Sent | None,
    *,
    sums: Callable[[int], bool],
    inside: int | None = None,
    in_nodes: bool = False,
) -> Placement:
    """Choose how many replicas of a stage are neighbours: those with which the slowest links carry least.

    Args:
        shape: The mesh; its `dp_inside` is not read.
        links: Links that join the ranks.
        sent: Axis -> bytes that a rank sends in a step; None: nobody knows, and the stages of a replica are neighbours.
        sums: Whether gradients of so many copies on a node are summed there first.
        inside: The number of neighbours, if it is given.
        in_nodes: Whether sums inside nodes were asked for: an order without them is taken only where there is no other.
    """
    known = sent is not None or in_nodes
    shapes = [replace(shape, dp_inside=(inside or 1) if shape.pp_size > 1 else 1)]
    if inside is None and known and links.differ:
        shapes = shape.orders()
    if in_nodes:
        shapes = [one for one in shapes if one.copies_in_nodes(links.ranks_per_node) > 1] or shapes
    found = []
    for one in shapes:
        copies = one.copies_in_nodes(links.ranks_per_node)
        found.append(Placement(one, links, copies > 1 and sums(copies), sent))
    return min(found, key=lambda one: one.cost) if len(found) > 1 else found[0]


def map_of(placement: Placement, sums: str = "") -> list[str]:
    """Say which axis crosses which links, a line each; no lines where all links are alike.

    Args:
        placement: Positions of the ranks.
        sums: Words for how gradients are summed that several nodes have; "" where one ring joins all.
    """
    links, shape = placement.links, placement.shape
    if not links.differ or shape.world_size == 1:
        return []
    order = f"; neighbours are {_order(shape)}" if shape.pp_size > 1 and shape.dp_size > 1 else ""
    sizes = {
        "tp": shape.tp_size,
        "sp": shape.sp_size,
        "ep": shape.ep_size,
        "pp": shape.pp_size,
        "dp": shape.num_copies,
    }
    lines = [f"links: {links.describe()}{order}"]
    for axis, size in sizes.items():
        if size == 1:
            continue
        known = placement.sent is not None and axis in placement.sent
        carried = placement.carried(axis, None if known else 1.0)
        where = [f"{kind} {_size(carried[kind])}" if known else kind for kind in reversed(KINDS) if kind in carried]
        crosses = axis == "dp" and NETWORK in carried
        way = "inside each node, then between nodes" if placement.sums_in_nodes else sums or "in one ring"
        lines.append(f"  {axis} {size}: {', '.join(where)}{f'; summed {way}' if crosses else ''}")
    if placement.sent is not None:
        lines.append(f"  sent in a step, by the planner: {_ends(links)}")
    return lines


def _ends(links: Links) -> str:
    """Name the sender that each kind of link is counted for."""
    has_fast = links.fast < links.ranks_per_node
    ends = {FAST: "a rank"} if has_fast else {}
    ends[NODE] = f"the {links.fast} ranks that fast links join" if has_fast else "a rank"
    ends |= {NETWORK: "a node"} if links.nodes > 1 else {}
    return ", ".join(f"on {kind} of {end}" for kind, end in ends.items())


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def _order(shape: MeshShape) -> str:
    """Name what stands next to each other behind the ranks that share layers: stages or replicas."""
    if shape.dp_inside == 1:
        return "the stages of a replica"
    if shape.dp_inside == shape.dp_size:
        return "the replicas of a stage"
    return f"{shape.dp_inside} replicas of a stage, then its stages"
