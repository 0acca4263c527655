"""Find ranks that compute longer than their peers, and longer than their share of the plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hf_parallel.mesh.shape import MeshShape


# Without replicas a rank is compared with what the plan gives it, and the plan may be wrong by so much.
PLANS_ERROR: Final = 1.5


@dataclass(frozen=True)
class Slow:
    """A rank that is slow.

    Attributes:
        rank: Rank in the world.
        ratio: Its seconds over the median of its peers'.
        by_plan: Whether its peers hold other stages.
    """

    rank: int
    ratio: float
    by_plan: bool


def slow_ranks(seconds: Sequence[float], shares: Sequence[float], shape: MeshShape, factor: float) -> list[Slow]:
    """The ranks whose computing takes `factor` times as long as the median of their peers.

    Peers of a rank are the ranks that hold the same stages: its replicas and the other shards. Where it has none, they are all
    others, and seconds are divided by the planned shares of the compute.

    Args:
        seconds: Seconds that each rank computes in a step.
        shares: Planned share of each pipeline rank.
        shape: Shape of the mesh.
        factor: Above 1.
    """
    pp_rank_of = [shape.coordinates(rank)[1] for rank in range(shape.world_size)]
    found = []
    for rank, own in enumerate(seconds):
        alike = [seconds[r] for r in range(len(seconds)) if r != rank and pp_rank_of[r] == pp_rank_of[rank]]
        if alike:
            ratio = _ratio(own, alike)
            by_plan = False
        else:
            rates = [s / (shares[pp_rank_of[r]] or 1.0) for r, s in enumerate(seconds)]
            ratio = _ratio(rates[rank], [rate for r, rate in enumerate(rates) if r != rank])
            by_plan = True
        if ratio >= factor * (PLANS_ERROR if by_plan else 1.0):
            found.append(Slow(rank, ratio, by_plan))
    return found


def _ratio(own: float, others: Sequence[float]) -> float:
    median = statistics.median(others) if others else 0.0
    return own / median if median else 0.0


def words(slow: Slow, shape: MeshShape, seconds: Sequence[float]) -> str:
    """Describe a slow rank in a sentence."""
    name, own = shape.describe(slow.rank), f"{seconds[slow.rank]:.3g} s a step"
    if slow.by_plan:
        return (
            f"{name} computes {own}, {slow.ratio:.2f} times its share of the plan: its device is slow, or the cut gives it too "
            "much. Look at its clock, temperature and other processes, or set pipeline.costs to measured or pipeline.rank_speed."
        )
    experts = ", at how many tokens chose its experts" if shape.ep_size > 1 else ""
    return (
        f"{name} computes {own}, {slow.ratio:.2f} times as long as the ranks with the same work. Look at its clock, temperature "
        f"and other processes{experts}, or set pipeline.rank_speed."
    )
