"""Block ranges of the stages: even, given, or balanced by cost.

`balanced` first makes the costliest stage as cheap as it can be. With one stage a rank that is the shortest step but for
about 1 %; with several, the sum over a rank's stages and their places in the schedule matter too, so the cut is then
refined with the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from typing import Final, Literal

from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, stage_costs
from hf_parallel.pipeline_parallel.schedule.actions import Schedule
from hf_parallel.pipeline_parallel.schedule.simulate import simulate


Split = Literal["balanced", "even"] | Sequence[int]

MAX_SIMULATIONS: Final = 600


def partition(
    num_blocks: int,
    num_stages: int,
    split: Split,
    costs: StageCosts | None = None,
    *,
    allowed: Collection[int] | None = None,
    schedule: Schedule | None = None,
) -> list[int]:
    """Bounds [0, ..., num_blocks] of contiguous stages; only the last may be empty (the tail alone).

    Args:
        num_blocks: blocks of the stack.
        num_stages: stages, 1 .. num_blocks, or one more where the last may be empty.
        split: "even" (sizes differ by at most one, larger stages first, none empty), "balanced" (smallest possible cost
            of the costliest stage, then the smallest sum of squares; refined if `schedule` puts several stages on a
            rank), or the number of blocks of each stage.
        costs: needed by "balanced"; equal blocks without it.
        allowed: boundaries 1 .. num_blocks that "balanced" may choose; None for all.
        schedule: actions of a training step. With it, "balanced" is never slower under the simulator than "even" or
            than the smallest maximum.

    Raises:
        PlanError: Fewer blocks than stages, no allowed partition, or an explicit list that does not fit.
    """
    if not isinstance(split, str):
        return _given(list(split), num_blocks, num_stages)
    if split not in ("balanced", "even"):
        raise PlanError(f"pipeline.split={split!r} is unknown. Use 'balanced', 'even' or a list of block counts.")
    if split == "even" or (costs is None and num_blocks >= num_stages):
        return _even(num_blocks, num_stages)
    return _balanced(num_blocks, num_stages, costs or StageCosts((1.0,) * num_blocks), allowed, schedule)


def step_time(bounds: Sequence[int], costs: StageCosts, schedule: Schedule) -> float:
    """Time of a training step without latency, in the unit of the costs; a split backward is half weight gradients."""
    return simulate(schedule, stage_costs(bounds, costs), stage_costs(bounds, costs.of_backward())).makespan


def _given(sizes: list[int], num_blocks: int, num_stages: int) -> list[int]:
    if len(sizes) != num_stages or sum(sizes) != num_blocks or min([*sizes[:-1], 1]) < 1 or sizes[-1] < 0:
        raise PlanError(
            f"pipeline.split={sizes} has {len(sizes)} entries that sum to {sum(sizes)}; it needs {num_stages} entries "
            f">= 1 (one a stage; the last may be 0, the head alone) that sum to the model's {num_blocks} blocks."
        )
    return [0, *accumulate(sizes)]


def _even(num_blocks: int, num_stages: int) -> list[int]:
    if num_stages < 1 or num_blocks < num_stages:
        raise PlanError(_too_few(num_blocks, num_stages, "at least one block each", num_blocks))
    size, larger = divmod(num_blocks, num_stages)
    return [0, *accumulate(size + (i < larger) for i in range(num_stages))]


def _too_few(num_blocks: int, num_stages: int, need: str, most: int) -> str:
    return (
        f"pp_size x virtual stages = {num_stages} stages need {need}, but the model has {num_blocks} blocks. Use at most "
        f"{max(most, 1)} stages."
    )


def _balanced(
    num_blocks: int,
    num_stages: int,
    costs: StageCosts,
    allowed: Collection[int] | None,
    schedule: Schedule | None,
) -> list[int]:
    if num_stages < 1 or num_blocks < max(1, num_stages - 1):
        need = "at least one block each (the last may do with the head alone)"
        raise PlanError(_too_few(num_blocks, num_stages, need, num_blocks + 1))
    if len(costs.blocks) != num_blocks:
        raise PlanError(
            f"costs name {len(costs.blocks)} blocks, the model has {num_blocks}. Make them from its own plan."
        )
    places = sorted({b for b in allowed if 1 <= b <= num_blocks} if allowed is not None else range(1, num_blocks + 1))
    if len(places) < num_stages - 1:
        raise PlanError(
            f"{num_stages} stages need {num_stages - 1} cuts, but the model can be cut before the blocks {places} only "
            f"({num_blocks} is the cut before the head). Use at most {len(places) + 1} stages."
        )
    smallest = _smallest_maximum(num_blocks, num_stages, costs.of_both(), places)
    if schedule is None or num_stages == 1:
        return smallest
    starts = [smallest]
    if num_blocks >= num_stages and set((even := _even(num_blocks, num_stages))[1:-1]) <= set(places):
        starts.append(even)
    if all(len({action.stage for action in actions}) <= 1 for actions in schedule):
        return min(starts, key=lambda bounds: step_time(bounds, costs, schedule))
    return _refine(starts, costs, schedule, places)


def _smallest_maximum(num_blocks: int, num_stages: int, costs: StageCosts, places: Sequence[int]) -> list[int]:
    """Dynamic program twice: the smallest maximum first, then the evenest partition that reaches it."""
    sums = [0.0, *accumulate(costs.blocks)]

    def cost_of(lo: int, hi: int, index: int) -> float:
        extra = (costs.first if index == 0 else 0.0) + (costs.last if index == num_stages - 1 else 0.0)
        return sums[hi] - sums[lo] + extra

    def solve(limit: float, by_maximum: bool) -> tuple[float, list[int]]:
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for index in range(num_stages):
            is_last = index == num_stages - 1
            row: dict[int, tuple[float, list[int]]] = {}
            for hi in [num_blocks] if is_last else places:
                for lo, (value, path) in best.items():
                    if lo > hi or (lo == hi and not is_last) or (cost := cost_of(lo, hi, index)) > limit:
                        continue
                    total = max(value, cost) if by_maximum else value + cost * cost
                    if hi not in row or total < row[hi][0]:
                        row[hi] = (total, [*path, hi])
            best = row
        return best[num_blocks]

    smallest, _ = solve(float("inf"), by_maximum=True)
    return solve(smallest * (1 + 1e-12), by_maximum=False)[1]


def _refine(starts: Sequence[list[int]], costs: StageCosts, schedule: Schedule, places: Sequence[int]) -> list[int]:
    """The best cut that hill-climbing finds from any of the starts."""
    found = [_climb(start, costs, schedule, places, MAX_SIMULATIONS // len(starts)) for start in starts]
    return min(found, key=lambda pair: pair[0])[1]


def _climb(
    bounds: list[int], costs: StageCosts, schedule: Schedule, places: Sequence[int], budget: int
) -> tuple[float, list[int]]:
    """Take the first move that shortens the step until none does or `budget` cuts were simulated."""
    best, moved = step_time(bounds, costs, schedule), True
    while moved:
        moved = False
        for candidate in _moves(bounds, places):
            if budget <= 0:
                return best, bounds
            budget -= 1
            time = step_time(candidate, costs, schedule)
            if time < best * (1 - 1e-9):
                best, bounds, moved = time, candidate, True
                break
    return best, bounds


def _moves(bounds: list[int], places: Sequence[int]) -> Iterator[list[int]]:
    """Cuts that differ in one boundary by one allowed place, then in two, then in one by two places."""
    place_of = {place: at for at, place in enumerate(places)}
    inner = [place_of[b] for b in bounds[1:-1]]
    for count, width in ((1, 1), (2, 1), (1, 2)):
        for which in combinations(range(len(inner)), count):
            for steps in product((-width, width), repeat=count):
                moved = list(inner)
                for index, step in zip(which, steps, strict=True):
                    moved[index] += step
                if moved[0] >= 0 and moved[-1] < len(places) and all(a < b for a, b in pairwise(moved)):
                    yield [0, *(places[at] for at in moved), bounds[-1]]
