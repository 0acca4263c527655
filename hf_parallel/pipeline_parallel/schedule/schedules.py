"""The family of pipeline schedules: pure generators of action lists, by name, with no process group and no tensor.

p is the number of ranks, m of microbatches and v of stages a rank. Every schedule takes any m of at least 1: a
generator that wants another number makes the next one that it supports and drops the surplus microbatches.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.schedule.actions import Action, Kind
from hf_parallel.pipeline_parallel.schedule.zero_bubble import dualpipev, zbv_zero_bubble


@dataclass(frozen=True)
class Family:
    """A schedule and what it asks of the stages.

    Attributes:
        name: The name in the configuration.
        stages_per_rank_default: Stages a rank where the user gives none.
        fixed_stages_per_rank: The only number that the schedule supports, or None for any of at least 1.
        splits_backward: Whether it runs a backward as inputs first ("I"), weights later ("W").
        placement: "loop" puts stages r, r + p, r + 2p, ... on rank r; "v" puts r and 2p - 1 - r there.
        make: The generator: p, m and v to the actions of each rank.
    """

    name: str
    stages_per_rank_default: int
    fixed_stages_per_rank: int | None
    splits_backward: bool
    placement: Literal["loop", "v"]
    make: Callable[[int, int, int], list[list[Action]]]


def build_schedule(
    name: str, pp_size: int, num_microbatches: int, *, stages_per_rank: int | None = None
) -> list[list[Action]]:
    """Return the actions of each rank, in execution order.

    Args:
        name: A key of `SCHEDULES`.
        pp_size: Number of ranks, at least 1.
        num_microbatches: Number of microbatches, at least 1.
        stages_per_rank: Stages of every rank; None takes the schedule's default.

    Raises:
        ScheduleError: If the name is unknown or the schedule does not support the sizes.
    """
    _check_sizes(pp_size, num_microbatches)
    family, stages = _family_of(name, pp_size, stages_per_rank)
    return family.make(pp_size, num_microbatches, stages)


def stages_of_ranks(name: str, pp_size: int, stages_per_rank: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, ascending.

    Raises:
        ScheduleError: If the name is unknown or the schedule does not support the sizes.
    """
    family, stages = _family_of(name, pp_size, stages_per_rank)
    if family.placement == "v":
        return tuple((rank, 2 * pp_size - 1 - rank) for rank in range(pp_size))
    return tuple(tuple(range(rank, pp_size * stages, pp_size)) for rank in range(pp_size))


def naive(pp_size: int, num_microbatches: int) -> list[list[Action]]:
    """Return the schedule that takes one microbatch through all stages and back before the next.

    A stage holds one microbatch alive; the bubble is 1 - 1 / p.
    """
    return [_alternate(*_passes([rank], num_microbatches), warmup=0) for rank in range(pp_size)]


def gpipe(pp_size: int, num_microbatches: int) -> list[list[Action]]:
    """Return all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    A stage holds m microbatches alive; the bubble is (p - 1) / (m + p - 1).
    """
    _check_sizes(pp_size, num_microbatches)
    return [_alternate(*_passes([rank], num_microbatches), warmup=num_microbatches) for rank in range(pp_size)]


def one_f_one_b(pp_size: int, num_microbatches: int) -> list[list[Action]]:
    """Return the schedule that alternates one forward and one backward after a warm-up (PipeDream-Flush).

    Stage s holds at most min(m, p - s) microbatches alive; the bubble is GPipe's (Narayanan et al. 2021,
    arXiv:2006.09503). Two ranks and four microbatches, as (stage, pass, microbatch):

        rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Args:
        pp_size: Number of ranks, at least 1.
        num_microbatches: Number of microbatches, at least 1; may be fewer than ranks.
    """
    _check_sizes(pp_size, num_microbatches)
    return [_alternate(*_passes([rank], num_microbatches), warmup=pp_size - 1 - rank) for rank in range(pp_size)]


def interleaved_1f1b(pp_size: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Return 1F1B over v stages a rank, which shortens the bubble about v times (Narayanan et al. 2021).

    The microbatches pass in groups of g, where g = m up to p microbatches and p <= g < 2p above. Rank r holds at most
    min(m v, (v - 1) g + 2 (p - r) - 1) stage inputs alive. Source: arXiv:2104.04473, section 2.2.
    """
    if stages_per_rank == 1:
        return one_f_one_b(pp_size, num_microbatches)
    supported, group = grouping(pp_size, num_microbatches)
    schedule = []
    for rank in range(pp_size):
        stages = range(rank, pp_size * stages_per_rank, pp_size)
        warmup = (stages_per_rank - 1) * group + 2 * (pp_size - 1 - rank)
        schedule.append(_alternate(*_passes(stages, supported, group), warmup=warmup))
    return _keep(schedule, num_microbatches)


def interleaved_zero_bubble(pp_size: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Return interleaved 1F1B whose weight gradients fill the bubble (ZB-H1 of Qi et al. 2023, arXiv:2401.10241).

    Weight gradients of rank r start r backwards late, so that every rank holds at most min(m v, (v - 1) g + p) stage
    inputs alive, with the groups of g of `interleaved_1f1b`.
    """
    supported, group = grouping(pp_size, num_microbatches)
    schedule = []
    for rank in range(pp_size):
        stages = range(rank, pp_size * stages_per_rank, pp_size)
        warmup = (stages_per_rank - 1) * group + pp_size - 1 - rank
        schedule.append(_alternate(*_passes(stages, supported, group), warmup=warmup, weights_late=rank))
    return _keep(schedule, num_microbatches)


def forward_only(stages: Sequence[Sequence[int]], num_microbatches: int) -> list[list[Action]]:
    """Return the forwards alone, for evaluation, under any placement.

    Each rank runs, among what equal stage times let it run, the deepest stage; microbatches stay in order.

    Args:
        stages: The stages of each rank, as `stages_of_ranks` returns them.
        num_microbatches: Number of microbatches, at least 1.
    """
    num_stages = sum(map(len, stages))
    _check_sizes(num_stages, num_microbatches)
    passed = [0] * num_stages
    schedule: list[list[Action]] = [[] for _ in stages]
    while min(passed) < num_microbatches:
        runnable = [
            [s for s in mine if passed[s] < num_microbatches and (s == 0 or passed[s - 1] > passed[s])]
            for mine in stages
        ]
        for rank, candidates in enumerate(runnable):
            if candidates:
                stage = max(candidates)
                schedule[rank].append(Action(stage, "F", passed[stage]))
                passed[stage] += 1
    return schedule


def all_forwards(stages: Sequence[Sequence[int]], num_microbatches: int) -> list[list[Action]]:
    """Return the first half of a step whose loss the caller computes: the forwards of all microbatches."""
    return forward_only(stages, num_microbatches)


def all_backwards(stages: Sequence[Sequence[int]], num_microbatches: int) -> list[list[Action]]:
    """Return the second half of a step whose loss the caller computes: the mirror image of `all_forwards`."""
    last = sum(map(len, stages)) - 1
    mirrored = forward_only([[last - stage for stage in mine] for mine in stages], num_microbatches)
    return [[Action(last - action.stage, "B", action.microbatch) for action in actions] for actions in mirrored]


def grouping(pp_size: int, num_microbatches: int) -> tuple[int, int]:
    """Return the microbatches that an interleaved schedule is made for, at least those given, and its group size."""
    supported = num_microbatches
    while supported % (rounds := max(1, supported // pp_size)):
        supported += 1
    return supported, supported // rounds


def _passes(
    stages: Sequence[int], num_microbatches: int, group: int = 1
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (stage, microbatch) pairs of a rank in forward and in backward order, by groups of microbatches."""
    starts = range(0, num_microbatches, group)
    forwards = [(stage, start + i) for start in starts for stage in stages for i in range(group)]
    backwards = [(stage, start + i) for start in starts for stage in reversed(stages) for i in range(group)]
    return forwards, backwards


def _alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    *,
    warmup: int,
    weights_late: int | None = None,
) -> list[Action]:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left.

    With ``weights_late`` a backward is an I, and its W follows that many backwards later.
    """
    actions = [Action(stage, "F", i) for stage, i in forwards[:warmup]]
    kind: Kind = "B" if weights_late is None else "I"
    for done, (stage, i) in enumerate(backwards):
        actions += [Action(s, "F", j) for s, j in forwards[warmup + done : warmup + done + 1]]
        actions.append(Action(stage, kind, i))
        if weights_late is not None and done >= weights_late:
            late_stage, late = backwards[done - weights_late]
            actions.append(Action(late_stage, "W", late))
    if weights_late:
        actions += [Action(stage, "W", i) for stage, i in backwards[-weights_late:]]
    return actions


def _keep(schedule: Sequence[Sequence[Action]], num_microbatches: int) -> list[list[Action]]:
    return [[action for action in actions if action.microbatch < num_microbatches] for actions in schedule]


def _family_of(name: str, pp_size: int, stages_per_rank: int | None) -> tuple[Family, int]:
    """Return the schedule's entry and the stages of a rank."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(str(name), SCHEDULES, 1, 0.0)[0]
        raise ScheduleError(f"schedule {name!r} is unknown. Did you mean {near!r}? Known: {', '.join(SCHEDULES)}.")
    _check_sizes(pp_size, 1)
    family = SCHEDULES[name]
    stages = family.stages_per_rank_default if stages_per_rank is None else stages_per_rank
    fixed = family.fixed_stages_per_rank
    if stages < 1 or fixed not in (None, stages):
        rule = "at least one stage" if fixed is None else f"exactly {fixed}"
        raise ScheduleError(
            f"stages_per_rank={stages}: schedule {name} needs {rule} a rank. "
            f"Set it to {fixed or family.stages_per_rank_default} or leave it out."
        )
    return family, stages


def _check_sizes(pp_size: int, num_microbatches: int) -> None:
    if pp_size < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"num_stages={pp_size}, num_microbatches={num_microbatches}: a schedule needs at least one of each. "
            "Set both to 1 or more."
        )


SCHEDULES: Final[dict[str, Family]] = {
    family.name: family
    for family in (
        Family("naive", 1, 1, False, "loop", lambda p, m, v: naive(p, m)),
        Family("gpipe", 1, 1, False, "loop", lambda p, m, v: gpipe(p, m)),
        Family("1f1b", 1, 1, False, "loop", lambda p, m, v: one_f_one_b(p, m)),
        Family("interleaved_1f1b", 2, None, False, "loop", interleaved_1f1b),
        Family("interleaved_zero_bubble", 2, None, True, "loop", interleaved_zero_bubble),
        Family("zbv_zero_bubble", 2, 2, True, "v", lambda p, m, v: zbv_zero_bubble(p, m)),
        Family("dualpipev", 2, 2, True, "v", lambda p, m, v: dualpipev(p, m)),
    )
}
