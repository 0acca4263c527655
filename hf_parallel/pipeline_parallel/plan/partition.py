"""Block ranges of the stages: even, given, or balanced by cost.

`balanced` first makes the costliest stage as cheap as it can be. With one stage on each of equal ranks that is the shortest
step but for about 1 %. With several stages a rank, the sum over a rank's stages and their places in the schedule matter too;
on ranks of different speed or memory the slowest stage does not set the pace alone. The cut is then refined with the simulator.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from typing import Final, Literal, TypeAlias

from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, costs_of_stages, stage_costs
from hf_parallel.pipeline_parallel.plan.stage_memory import StageMemory
from hf_parallel.pipeline_parallel.schedule.actions import Schedule
from hf_parallel.pipeline_parallel.schedule.simulate import simulate


Split = Literal["balanced", "even"] | Sequence[int]
StageCost: TypeAlias = Callable[[int, int, int], float]  # of a stage of blocks [lo, hi), by its index
Score: TypeAlias = tuple[float, float]  # bytes above what ranks may hold (a share of it), time of a step

MAX_SIMULATIONS: Final = 600


def partition(
    num_blocks: int,
    num_stages: int,
    split: Split,
    costs: StageCosts | None = None,
    *,
    allowed: Collection[int] | None = None,
    schedule: Schedule | None = None,
    speeds: Sequence[float] | None = None,
    memory: StageMemory | None = None,
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
        speeds: of the rank of each stage, above 0; None if all are equal. "balanced" weighs stages by them.
        memory: what stages need and ranks may hold, of the same schedule; "balanced" never exceeds it.

    Raises:
        PlanError: Fewer blocks than stages, no allowed partition, an explicit list that does not fit, or no cut that the
            memory allows.
    """
    if not isinstance(split, str):
        return _given(list(split), num_blocks, num_stages)
    if split not in ("balanced", "even"):
        raise PlanError(f"pipeline.split={split!r} is unknown. Use 'balanced', 'even' or a list of block counts.")
    equal = speeds is None and memory is None
    if split == "even" or (costs is None and equal and num_blocks >= num_stages):
        return _even(num_blocks, num_stages)
    costs = costs or StageCosts((1.0,) * num_blocks)
    places = _places(num_blocks, num_stages, costs, allowed)
    if equal:
        return _balanced(num_blocks, num_stages, costs, places, schedule)
    return _balanced_unequal(num_stages, costs, places, schedule, speeds, memory)


def step_time(
    bounds: Sequence[int], costs: StageCosts, schedule: Schedule, speeds: Sequence[float] | None = None
) -> float:
    """Time of a training step without latency, in the unit of the costs."""
    forward, backward, weights = costs_of_stages(bounds, costs, speeds)
    return simulate(schedule, forward, backward, weight_costs=weights).makespan


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


def _places(num_blocks: int, num_stages: int, costs: StageCosts, allowed: Collection[int] | None) -> list[int]:
    """The boundaries that "balanced" may choose, rising.

    Raises:
        PlanError: They are too few, or the costs are of another model.
    """
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
    return places


def _balanced(
    num_blocks: int, num_stages: int, costs: StageCosts, places: Sequence[int], schedule: Schedule | None
) -> list[int]:
    """The cut over equal ranks."""
    smallest = _smallest_maximum(num_blocks, num_stages, _cost_of(costs, num_stages, None), places)
    if smallest is None:  # every stage has a cost
        raise PlanError(_too_few(num_blocks, num_stages, "at least one block each", num_blocks))
    if schedule is None or num_stages == 1:
        return smallest
    starts = [smallest, *_allowed_even(num_blocks, num_stages, places)]
    if all(len({action.stage for action in actions}) <= 1 for actions in schedule):
        return min(starts, key=lambda bounds: step_time(bounds, costs, schedule))
    return _refine(starts, lambda bounds: (0.0, step_time(bounds, costs, schedule)), places)


def _balanced_unequal(
    num_stages: int,
    costs: StageCosts,
    places: Sequence[int],
    schedule: Schedule | None,
    speeds: Sequence[float] | None,
    memory: StageMemory | None,
) -> list[int]:
    """The cut over ranks of different speed or memory.

    Raises:
        PlanError: No cut was found that the memory allows; with one stage a rank there is none.
    """
    num_blocks, cost_of = len(costs.blocks), _cost_of(costs, num_stages, speeds)

    def score(bounds: Sequence[int]) -> Score:
        over = memory.excess(bounds) if memory is not None else 0.0
        times = stage_costs(bounds, costs.of_both(), speeds)
        return over, max(times) if schedule is None else step_time(bounds, costs, schedule, speeds)

    def fitting_cost_of(lo: int, hi: int, index: int) -> float:
        fits = memory is None or memory.share(lo, hi, index) <= 1.0
        return cost_of(lo, hi, index) if fits else math.inf

    found = [_smallest_maximum(num_blocks, num_stages, one, places) for one in (fitting_cost_of, cost_of)]
    if memory is not None:
        found.append(_smallest_maximum(num_blocks, num_stages, memory.share, places))
    starts = [start for start in found if start is not None] + _allowed_even(num_blocks, num_stages, places)
    bounds = _refine(starts, score, places)
    if memory is not None and score(bounds)[0] > 0.0:
        raise PlanError(memory.refusal(bounds))
    return bounds


def _allowed_even(num_blocks: int, num_stages: int, places: Sequence[int]) -> list[list[int]]:
    """The even cut, if it can be made."""
    if num_blocks < num_stages:
        return []
    even = _even(num_blocks, num_stages)
    return [even] if set(even[1:-1]) <= set(places) else []


def _cost_of(costs: StageCosts, num_stages: int, speeds: Sequence[float] | None) -> StageCost:
    """Forward and backward of a stage on its rank."""
    both = costs.of_both()
    sums = [0.0, *accumulate(both.blocks)]

    def cost_of(lo: int, hi: int, index: int) -> float:
        extra = (both.first if index == 0 else 0.0) + (both.last if index == num_stages - 1 else 0.0)
        return (sums[hi] - sums[lo] + extra) / (speeds[index] if speeds is not None else 1.0)

    return cost_of


def _smallest_maximum(num_blocks: int, num_stages: int, cost_of: StageCost, places: Sequence[int]) -> list[int] | None:
    """Dynamic program twice: the smallest maximum first, then the evenest partition that reaches it; None if all are infinite."""

    def solve(limit: float, by_maximum: bool) -> tuple[float, list[int]] | None:
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
        return best.get(num_blocks)

    smallest = solve(sys.float_info.max, by_maximum=True)
    evenest = solve(smallest[0] * (1 + 1e-12), by_maximum=False) if smallest is not None else None
    return evenest[1] if evenest is not None else None


def _refine(starts: Sequence[list[int]], score: Callable[[Sequence[int]], Score], places: Sequence[int]) -> list[int]:
    """The best cut that hill-climbing finds from any of the starts."""
    found = [_climb(start, score, places, MAX_SIMULATIONS // len(starts)) for start in starts]
    return min(found, key=lambda pair: pair[0])[1]


def _climb(
    bounds: list[int], score: Callable[[Sequence[int]], Score], places: Sequence[int], budget: int
) -> tuple[Score, list[int]]:
    """Take the first move to a better score until there is none or `budget` cuts were tried."""
    best, moved = score(bounds), True
    while moved:
        moved = False
        for candidate in _moves(bounds, places):
            if budget <= 0:
                return best, bounds
            budget -= 1
            over, time = score(candidate)
            if over < best[0] or (over == best[0] and time < best[1] * (1 - 1e-9)):
                best, bounds, moved = (over, time), candidate, True
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
