"""Pipelines that do not drain between optimizer steps: PipeDream and PipeDream-2BW, one step's share at a time.

A *window* is the microbatches of one optimizer step. A window t runs with weights that are `delay` updates old, so that the
windows after it may enter the pipeline before its gradients are complete. Every rank follows the order of 1F1B through
all windows without a pause. A *slice* is what the ranks do of it during one optimizer step: it ends when stage 0 has finished the
last backward of the window, the others have begun windows that follow. Without vertical sync it ends on each rank with that rank's
own last backward of the window, so that a rank nearer to the loss steps earlier, and its weights are less old.

p is the number of ranks, m of microbatches in a window.

Source: Narayanan et al. 2019 (PipeDream, SOSP), 2021 (PipeDream-2BW, arXiv:2006.09503).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.schedule.actions import Action, Kind
from hf_parallel.pipeline_parallel.schedule.program import Program
from hf_parallel.settings.schedule_names import ASYNCHRONOUS


FORWARD_COST, BACKWARD_COST = 1.0, 2.0
Done: TypeAlias = tuple[tuple[int, int], ...]  # of each rank: forwards and backwards since the window's first


@dataclass(frozen=True)
class Slice:
    """One optimizer step of all ranks.

    Attributes:
        schedule: The actions of each rank; microbatches count from the first of the window that ends here.
        done: Progress of each rank in the window that ends next.
        send_window: Sends to one rank that may be left unreceived.
    """

    schedule: tuple[tuple[Action, ...], ...]
    done: Done
    send_window: int

    def program(self, rank: int) -> Program:
        """The actions of one rank; its stage has the number of the rank."""
        sent = {rank - 1: "F", rank + 1: "B"}  # by each neighbour
        incoming = {
            peer: tuple(action for action in self.schedule[peer] if action.kind == kind)
            for peer, kind in sent.items()
            if 0 <= peer < len(self.schedule)
        }
        return Program(self.schedule[rank], incoming, self.send_window)


def delay_of(name: str, pp_size: int) -> int:
    """Number of updates by which the weights of a window are older than the newest before its own.

    Raises:
        ScheduleError: The schedule drains the pipeline in every step.
    """
    if name not in ASYNCHRONOUS:
        raise ScheduleError(f"schedule {name!r} has no delay. Choose one of {', '.join(ASYNCHRONOUS)}.")
    return 1 if name == "pipedream_2bw" else max(1, pp_size - 1)


def delays_of(name: str, pp_size: int, *, vertical_sync: bool = True) -> tuple[int, ...]:
    """`delay_of` on each rank: alike with vertical sync, else what 1F1B leaves each rank; the first has the most.

    Raises:
        ScheduleError: The schedule drains the pipeline in every step.
    """
    most = delay_of(name, pp_size)
    return (most,) * pp_size if vertical_sync else tuple(range(pp_size - 1, -1, -1))


def empty(pp_size: int) -> Done:
    """The state in which no rank has done anything of a window."""
    return ((0, 0),) * pp_size


def next_slice(done: Done, counts: Sequence[int], *, vertical_sync: bool = True) -> Slice:
    """Return what each rank does until the first of some windows is complete.

    Args:
        done: Actions of them that each rank has done.
        counts: Microbatches of each window that may be in the pipeline, the first of which is to be completed.
        vertical_sync: Whether all ranks end together.
    """
    orders = _orders(done, sum(counts))
    first = counts[0]
    if vertical_sync:
        starts, ends = _times(done, orders)
        end = ends[0][orders[0].index(("B", first - 1))]
        kept = [order[: sum(start < end for start in own)] for order, own in zip(orders, starts, strict=True)]
    else:
        kept = [order[: order.index(("B", first - 1)) + 1] for order in orders]
    schedule = tuple(tuple(Action(rank, kind, index) for kind, index in order) for rank, order in enumerate(kept))
    after = []
    for (forwards, backwards), order in zip(done, kept, strict=True):
        made = sum(kind == "F" for kind, _ in order)
        after.append((forwards + made - first, backwards + len(order) - made - first))
    under_way = [abs(one[k] - other[k]) for one, other in pairwise(after) for k in (0, 1)]
    return Slice(schedule, tuple(after), 2 + max(under_way, default=0))


def several_steps(name: str, pp_size: int, num_microbatches: int, steps: int) -> list[list[Action]]:
    """Return what each rank does in some optimizer steps, from an empty pipeline to an empty one; to be drawn and timed.

    Args:
        name: Name of the schedule.
        pp_size: Number of ranks.
        num_microbatches: Microbatches of an optimizer step; 1 for `pipedream`.
        steps: Optimizer steps.
    """
    windows, done = 1 + delay_of(name, pp_size), empty(pp_size)
    schedule: list[list[Action]] = [[] for _ in range(pp_size)]
    for step in range(steps):
        found = next_slice(done, [num_microbatches] * min(windows, steps - step))
        done = found.done
        for rank, actions in enumerate(schedule):
            actions += found.program(rank).shifted(step * num_microbatches).actions
    return schedule


def _orders(done: Done, total: int) -> list[list[tuple[Kind, int]]]:
    """Order what each rank has left of `total` microbatches as 1F1B does: at most p - r of them live on rank r."""
    orders: list[list[tuple[Kind, int]]] = []
    for rank, (forwards, backwards) in enumerate(done):
        order: list[tuple[Kind, int]] = []
        while backwards < total:
            if forwards < total and forwards - backwards < len(done) - rank:
                order.append(("F", forwards))
                forwards += 1
            else:
                order.append(("B", backwards))
                backwards += 1
        orders.append(order)
    return orders


def _times(done: Done, orders: Sequence[Sequence[tuple[Kind, int]]]) -> tuple[list[list[float]], list[list[float]]]:
    """Simulate equal stages; gives when each action of each rank starts and ends. What was done before has arrived."""
    last = len(done) - 1
    made: list[dict[tuple[Kind, int], float]] = [{} for _ in done]
    starts: list[list[float]] = [[] for _ in done]
    ends: list[list[float]] = [[] for _ in done]

    def arrival(rank: int, kind: Kind, index: int) -> float | None:
        """Time at which the input of an action is there; None if that is not known yet."""
        source = rank - 1 if kind == "F" else rank + 1
        if source < 0 or source > last or index < done[source][kind == "B"]:
            return 0.0
        return made[source].get((kind, index))

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for kind, index in order[len(ends[rank]) :]:
                ready = arrival(rank, kind, index)
                if ready is None:
                    break
                start = max(ready, ends[rank][-1] if ends[rank] else 0.0)
                starts[rank].append(start)
                ends[rank].append(start + (FORWARD_COST if kind == "F" else BACKWARD_COST))
                made[rank][kind, index] = ends[rank][-1]
                moved = True
    return starts, ends
