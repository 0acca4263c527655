"""The passes of an optimizer step through the stages: where blocks go, and when the last pass ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import simulate
from hf_parallel.planner.layout import LayoutSpec


ROUNDS: Final = 3  # of pp_size micro-batches that are simulated before a step repeats itself
CLOSED: Final = frozenset({"naive", "gpipe", "1f1b", "interleaved_1f1b"})


@functools.lru_cache(maxsize=256)
def schedule_of(name: str, pp: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The actions of each rank."""
    return build_schedule(name, pp, num_microbatches, stages_per_rank=stages_per_rank)


@functools.lru_cache(maxsize=256)
def _placement(name: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    return placement_of(schedule_of(name, pp, pp, stages_per_rank))


def placement(spec: LayoutSpec) -> tuple[int, ...]:
    """The rank of each stage."""
    if spec.pp == 1:
        return (0,) * spec.num_stages
    return _placement(spec.schedule, spec.pp, spec.stages_per_rank)


def cut(costs: Sequence[float], first: float, last: float, num_stages: int, *, even: bool) -> list[int]:
    """Blocks of each stage.

    Args:
        costs: Cost of each block.
        first: What the first stage has besides (the embedding).
        last: What the last stage has besides (the head).
        num_stages: Stages.
        even: Megatron's cuts where they are: equal counts, or with one block less at both ends. Else the largest stage
            costs least.
    """
    if num_stages == 1:
        return [len(costs)]
    if even and len(costs) % num_stages == 0:
        return [len(costs) // num_stages] * num_stages
    if even and (len(costs) + 2) % num_stages == 0:
        count = (len(costs) + 2) // num_stages
        return [count - 1, *[count] * (num_stages - 2), count - 1]
    low, high = max([*costs, first, last]), sum(costs) + first + last
    for _ in range(40):
        middle = (low + high) / 2
        if _filled(costs, first, last, num_stages, middle) is None:
            low = middle
        else:
            high = middle
    return _filled(costs, first, last, num_stages, high * (1 + 1e-9)) or [len(costs)]


def _filled(costs: Sequence[float], first: float, last: float, num_stages: int, most: float) -> list[int] | None:
    """Blocks of each stage if none costs more than `most`, filled from the end; None if that cannot be."""
    counts, loads = [0] * num_stages, [first, *[0.0] * (num_stages - 1)]
    loads[-1] += last
    stage = num_stages - 1
    for left in range(len(costs) - 1, -1, -1):
        while stage > 0 and loads[stage] + costs[left] > most:
            stage -= 1
        if loads[stage] + costs[left] > most:
            return None
        loads[stage] += costs[left]
        counts[stage] += 1
    return counts


def makespan(
    spec: LayoutSpec,
    forward: Sequence[float],
    backward: Sequence[float],
    hop: float,
    *,
    weights: Sequence[float] | None = None,
    exact: bool = True,
) -> float:
    """Seconds of all passes of a step.

    Args:
        spec: The layout.
        forward: Seconds of each stage, its messages included.
        backward: The same of the backward.
        hop: Seconds that a message is on its way besides.
        weights: What gradients of weights take of each backward; None is half of it.
        exact: Simulate the schedule; else its closed form where it has one.
    """
    m, p = spec.num_microbatches, spec.pp
    if p == 1:
        return m * (sum(forward) + sum(backward))
    if not exact and spec.schedule in CLOSED:
        return _closed(spec, forward, backward, hop)
    rounds = ROUNDS if spec.schedule != "naive" else 1
    few = rounds * p + m % p
    odd = m % p and spec.schedule.startswith("interleaved")  # its groups are of another size for every count
    if spec.schedule == "gpipe" or m <= few + p or odd:
        return _simulated(spec, m, forward, backward, weights, hop)
    before, after = (_simulated(spec, count, forward, backward, weights, hop) for count in (few, few + p))
    # The first rounds of an uneven pipeline may be faster than those that follow.
    return max(before + (after - before) * (m - few) / p, m * max(_loads(spec, forward, backward)))


def _simulated(
    spec: LayoutSpec,
    count: int,
    forward: Sequence[float],
    backward: Sequence[float],
    weights: Sequence[float] | None,
    hop: float,
) -> float:
    schedule = schedule_of(spec.schedule, spec.pp, count, spec.stages_per_rank)
    return simulate(schedule, forward, backward, weight_costs=weights, latency=hop).makespan


def _closed(spec: LayoutSpec, forward: Sequence[float], backward: Sequence[float], hop: float) -> float:
    """Steady passes of the slowest rank, and one pass through all others, shared by a rank's stages."""
    m, p, v = spec.num_microbatches, spec.pp, spec.stages_per_rank
    ranks = _loads(spec, forward, backward)
    if spec.schedule == "naive":
        return m * (sum(ranks) + 2 * (len(forward) - 1) * hop)
    slowest = max(ranks)
    return m * slowest + (sum(ranks) - slowest) / v + 2 * (p - 1) * hop


def _loads(spec: LayoutSpec, forward: Sequence[float], backward: Sequence[float]) -> list[float]:
    """Seconds of a micro-batch on each rank."""
    loads = [0.0] * spec.pp
    for rank, *both in zip(placement(spec), forward, backward, strict=True):
        loads[rank] += sum(both)
    return loads
