"""Pure schedule generators: lists of actions for each rank, with no process group and no tensor.

Both training schedules have the bubble fraction (p - 1) / (m + p - 1) for p equally slow stages and m microbatches;
they differ in how many microbatches a stage holds alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.actions import Action


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    Every stage holds up to ``num_microbatches`` microbatches alive.
    """
    _check_sizes(num_stages, num_microbatches)
    return [
        [Action(stage, "F", i) for i in range(num_microbatches)]
        + [Action(stage, "B", i) for i in range(num_microbatches)]
        for stage in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_microbatches: int, *, extra_warmup: int = 0) -> list[list[Action]]:
    """Return the schedule that alternates one forward and one backward after a warm-up (PipeDream-Flush).

    Stage s holds at most ``min(num_microbatches, num_stages - s)`` microbatches alive, whatever their number (Narayanan
    et al. 2021, arXiv:2006.09503). Fewer microbatches than stages are allowed.

    Args:
        num_stages: Number of stages, at least 1.
        num_microbatches: Number of microbatches, at least 1.
        extra_warmup: Forwards added to the warm-up of every stage but the last, at least 0. Each hides one hop of
            latency a microbatch and costs one more live microbatch.
    """
    _check_sizes(num_stages, num_microbatches)
    schedule = []
    for stage in range(num_stages):
        warmup = num_stages - stage + (extra_warmup if stage < num_stages - 1 else 0)
        warmup = min(num_microbatches, warmup)
        actions = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(num_microbatches):
            actions.append(Action(stage, "B", i))
            if warmup + i < num_microbatches:
                actions.append(Action(stage, "F", warmup + i))
        schedule.append(actions)
    return schedule


def forward_only(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the forwards alone, for evaluation; nothing stays alive."""
    _check_sizes(num_stages, num_microbatches)
    return [[Action(stage, "F", i) for i in range(num_microbatches)] for stage in range(num_stages)]


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"num_stages={num_stages}, num_microbatches={num_microbatches}: a schedule needs at least one of each. "
            "Set both to 1 or more."
        )


SCHEDULES: Final[dict[str, Callable[[int, int], list[list[Action]]]]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
