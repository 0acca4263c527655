"""When each action of a schedule runs, from the stages' costs alone: step time, bubble and live microbatches.

The planner, the schedule view and the benchmarks all read their predictions from here, so the numbers agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.actions import Action, Schedule, input_of


@dataclass(frozen=True)
class Simulation:
    """A timed schedule.

    Attributes:
        makespan: Time from the first start to the last end, in the unit of the costs.
        busy: Time each rank computes, in the same unit.
        peak_live: Most microbatches each rank holds between forward and backward.
        spans: Start and end of every action.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    spans: Mapping[Action, tuple[float, float]]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, in [0, 1)."""
        total = self.makespan * len(self.busy)
        return 1.0 - sum(self.busy) / total if total else 0.0


def simulate(
    schedule: Schedule,
    forward_costs: Sequence[float],
    backward_costs: Sequence[float],
    *,
    latency: float = 0.0,
) -> Simulation:
    """Time a schedule, with sends that overlap compute and receives that wait.

    Args:
        schedule: The actions of each rank, as the generators return them.
        forward_costs: Forward time of each stage, at least 0; its length is the number of stages.
        backward_costs: Backward time of each stage, at least 0.
        latency: Time a message takes from the end of the sender's action, at least 0.

    Raises:
        ScheduleError: If the costs do not match in length or the schedule deadlocks.
    """
    num_stages = len(forward_costs)
    if len(backward_costs) != num_stages:
        raise ScheduleError(
            f"backward_costs has {len(backward_costs)} entries and forward_costs {num_stages}: give one a stage."
        )
    spans: dict[Action, tuple[float, float]] = {}
    position = [0] * len(schedule)
    clock = [0.0] * len(schedule)
    busy = [0.0] * len(schedule)
    rank_of = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                source = input_of(action, num_stages)
                if source is not None and source not in spans:
                    break
                hop = latency if source is not None and rank_of[source.stage] != rank else 0.0
                start = max(clock[rank], spans[source][1] + hop if source is not None else 0.0)
                cost = (forward_costs if action.kind == "F" else backward_costs)[action.stage]
                clock[rank] = start + cost
                busy[rank] += cost
                spans[action] = (start, clock[rank])
                position[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule):
        if position[rank] < len(actions):
            raise ScheduleError(
                f"schedule deadlocks: rank {rank} stops at {actions[position[rank]]}. Run check_schedule on it."
            )
    return Simulation(max(clock, default=0.0), tuple(busy), peak_live(schedule), spans)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Return the most microbatches each rank holds at once, counted from its actions' order.

    Without any backward (evaluation) nothing is held and every entry is 0.
    """
    peaks = []
    for actions in schedule:
        live = peak = 0
        trains = any(action.kind == "B" for action in actions)
        for action in actions:
            live += 1 if action.kind == "F" else -1
            peak = max(peak, live)
        peaks.append(peak if trains else 0)
    return tuple(peaks)
