"""All tensor-parallel ranks of a model as threads of one process, to check a plan by numbers without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.functions import VirtualGroup
from hf_parallel.tensor_parallel.shard_plan import TPPlan


T = TypeVar("T")


def virtual_groups(tp_size: int, timeout_s: float) -> list[VirtualGroup]:
    """One group object per rank; ranks that wait longer than `timeout_s` for the others give up."""
    slots: list[Tensor | None] = [None] * tp_size
    barrier = threading.Barrier(tp_size, timeout=timeout_s)
    return [VirtualGroup(slots, barrier, rank) for rank in range(tp_size)]


def run_virtual_ranks(groups: Sequence[VirtualGroup], main: Callable[[int], T]) -> list[T]:
    """`main(rank)` in one thread per rank, results in rank order.

    Raises:
        BaseException: The first error of a rank that is not the consequence of another rank's.
    """
    results: list[T | None] = [None] * len(groups)
    errors: list[BaseException | None] = [None] * len(groups)

    def rank_main(rank: int) -> None:
        try:
            results[rank] = main(rank)
        except BaseException as error:  # noqa: BLE001  raised below; the other ranks must not wait
            errors[rank] = error
            groups[rank].abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise next((error for error in raised if not isinstance(error, threading.BrokenBarrierError)), raised[0])
    return [result for result in results if result is not None]


def run_sharded(
    copies: Callable[[], nn.Module], plan: TPPlan, timeout_s: float, main: Callable[[nn.Module], T]
) -> list[T]:
    """Run `main` on every rank's part of a module; return the results in rank order.

    Args:
        copies: Makes a whole module of its own for a rank.
        plan: Plan of the module.
        timeout_s: The same as for `virtual_groups`.
        main: Runs a part; its collectives meet those of the other ranks.
    """
    groups = virtual_groups(plan.tp_size, timeout_s)
    modules = [copies() for _ in groups]
    for rank, (module, group) in enumerate(zip(modules, groups, strict=True)):
        apply_tensor_parallel(module, plan, group, rank, lambda name: True)
    return run_virtual_ranks(groups, lambda rank: main(modules[rank]))
