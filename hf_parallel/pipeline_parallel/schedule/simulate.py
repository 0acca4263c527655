"""Simulates a schedule from the stages' costs alone: start of each action, step time, bubble and live microbatches.

The planner, the schedule view and the benchmarks all read their predictions from here, so the numbers agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.schedule.actions import Action, Schedule, placement_of


@dataclass(frozen=True)
class Simulation:
    """A timed schedule.

    Attributes:
        makespan: Time from the first start to the last end, in the unit of the costs.
        busy: Time each rank computes, in the same unit.
        schedule: Schedule that was timed.
        starts: Start of every action, in the schedule's shape.
        ends: End of every action, in the schedule's shape.
    """

    makespan: float
    busy: tuple[float, ...]
    schedule: Schedule = field(repr=False)
    starts: Sequence[Sequence[float]] = field(repr=False)
    ends: Sequence[Sequence[float]] = field(repr=False)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, in [0, 1)."""
        total = self.makespan * len(self.busy)
        return 1.0 - sum(self.busy) / total if total else 0.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """See `peak_live`."""
        return peak_live(self.schedule)

    @cached_property
    def spans(self) -> Mapping[Action, tuple[float, float]]:
        """Start and end of every action."""
        return {
            action: (start, end)
            for actions, starts, ends in zip(self.schedule, self.starts, self.ends, strict=True)
            for action, start, end in zip(actions, starts, ends, strict=True)
        }


def simulate(
    schedule: Schedule,
    forward_costs: Sequence[float],
    backward_costs: Sequence[float],
    *,
    weight_costs: Sequence[float] | None = None,
    latency: float = 0.0,
) -> Simulation:
    """Time a schedule, with sends that overlap compute and receives that wait.

    Time and memory grow with the number of actions only.

    Args:
        schedule: The actions of each rank, as the generators return them.
        forward_costs: Forward time of each stage, at least 0; its length is the number of stages.
        backward_costs: Time of each stage's full backward, at least 0.
        weight_costs: Part of ``backward_costs`` that "W" takes and "I" saves; None means half.
        latency: Time a message takes to another rank, from the end of the sender's action, at least 0.

    Raises:
        ScheduleError: If the costs do not match the stages or the schedule deadlocks.
    """
    rank_of = placement_of(schedule)
    costs = _costs(len(rank_of), forward_costs, backward_costs, weight_costs)
    microbatches = 1 + max((action.microbatch for actions in schedule for action in actions), default=-1)
    # made[kind][stage + 1][microbatch]: when the output exists; the rows around the stages are the pipeline's ends.
    made: dict[str, list[list[float | None]]] = {
        kind: [[None] * microbatches for _ in range(len(rank_of) + 2)] for kind in "FB"
    }
    made["F"][0], made["B"][-1] = [0.0] * microbatches, [0.0] * microbatches
    hops = _hops(rank_of, latency)
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    waiting: dict[tuple[str, int, int], int] = {}
    ready = list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        clock = ends[rank][-1] if ends[rank] else 0.0
        for action in schedule[rank][len(ends[rank]) :]:
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            start = clock
            if kind != "W":
                direction = "F" if kind == "F" else "B"
                source = stage if kind == "F" else stage + 2
                arrived = made[direction][source][microbatch]
                if arrived is None:
                    waiting[direction, source, microbatch] = rank
                    break
                start = max(clock, arrived + hops[direction][stage])
            clock = start + costs[kind][stage]
            starts[rank].append(start)
            ends[rank].append(clock)
            if kind != "W":
                made[direction][stage + 1][microbatch] = clock
                woken = waiting.pop((direction, stage + 1, microbatch), None)
                if woken is not None:
                    ready.append(woken)
    _check_finished(schedule, ends)
    busy = tuple(sum(costs[action.kind][action.stage] for action in actions) for actions in schedule)
    return Simulation(max((own[-1] for own in ends if own), default=0.0), busy, schedule, starts, ends)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Return the most (stage, microbatch) pairs each rank holds at once, from F to the end of the backward (B or W).

    Without any backward (evaluation) nothing is held and every entry is 0.
    """
    return tuple(int(peak) for peak in peak_held(schedule, [1.0] * len(placement_of(schedule))))


def peak_held(schedule: Schedule, sizes: Sequence[float]) -> tuple[float, ...]:
    """Return the most that each rank holds at once if a microbatch on stage s weighs ``sizes[s]``; see `peak_live`."""
    peaks = []
    for actions in schedule:
        live = peak = 0.0
        trains = any(action.kind in "BW" for action in actions)
        for action in actions:
            live += sizes[action.stage] * (1 if action.kind == "F" else 0 if action.kind == "I" else -1)
            peak = max(peak, live)
        peaks.append(peak if trains else 0.0)
    return tuple(peaks)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return `peak_live` in units of one microbatch through all of a rank's stages, so that schedules compare."""
    stages = [len({action.stage for action in actions}) for actions in schedule]
    return tuple(live / max(1, own) for live, own in zip(peak_live(schedule), stages, strict=True))


def _costs(
    num_stages: int, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float] | None
) -> dict[str, list[float]]:
    """Return the cost of each kind on each stage."""
    weight = [cost / 2 for cost in backward] if weight is None else weight
    for name, costs in (("forward_costs", forward), ("backward_costs", backward), ("weight_costs", weight)):
        if len(costs) != num_stages:
            raise ScheduleError(
                f"{name} has {len(costs)} entries and the schedule {num_stages} stages: give one each."
            )
    for stage, (own, full) in enumerate(zip(weight, backward, strict=True)):
        if own > full:
            raise ScheduleError(
                f"weight_costs[{stage}]={own} is more than backward_costs[{stage}]={full}, of which it is a part. "
                "Lower it."
            )
    inputs = [full - own for full, own in zip(backward, weight, strict=True)]
    return {"F": list(forward), "B": list(backward), "I": inputs, "W": list(weight)}


def _hops(rank_of: Sequence[int], latency: float) -> dict[str, list[float]]:
    """Return the delay of each stage's incoming message, by direction."""
    apart = [latency if here != after else 0.0 for here, after in pairwise(rank_of)]
    return {"F": [0.0, *apart], "B": [*apart, 0.0]}


def _check_finished(schedule: Schedule, ends: Sequence[Sequence[float]]) -> None:
    for rank, (actions, own) in enumerate(zip(schedule, ends, strict=True)):
        if len(own) < len(actions):
            raise ScheduleError(
                f"schedule deadlocks: rank {rank} stops at {actions[len(own)]}. Run check_schedule on it."
            )
