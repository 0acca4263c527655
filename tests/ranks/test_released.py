"""What a run holds is freed when the run has ended: models, buckets and groups do not pile up in a process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import user_loops
from rank_runner import run_ranks


ENV = {"ACCELERATE_USE_CPU": "true"}


def held_after(rank: int, world_size: int, layouts: list[str]) -> dict[str, list[str]]:
    """Layout -> what still exists of the loops before the last."""
    found = {}
    for layout in layouts:
        alive: list[tuple[str, weakref.ref[Any]]] = []
        for _ in range(3):
            alive += trained(layout)
        last = len(alive) // 3  # accelerate's state may hold the last
        gc.collect()
        found[layout] = [name for name, reference in alive[:-last] if reference() is not None]
    return found


def trained(layout: str) -> list[tuple[str, weakref.ref[Any]]]:
    loop = user_loops.Loop(layout)
    loop.prepare()
    for step in range(2):
        loop.backward(step)
        loop.step()
    loop.result()
    engine = loop.accelerator.hf_parallel.engine
    kept = {"model": loop.model, "engine": engine, "gradients": engine.gradients, "mesh": engine.mesh}
    kept |= {f"parameter {name}": parameter for name, parameter in list(loop.named().items())[:2]}
    return [(name, weakref.ref(thing)) for name, thing in kept.items()]


LAYOUTS = ["dp2", "zero1", "zero2", "zero3", "pp2", "tp2"]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("released")
    return run_ranks(held_after, 2, LAYOUTS, tmp_path=folder, env=ENV, timeout=120)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_a_run_outlives_it(layout: str, held: dict[str, list[str]]) -> None:
    assert held[layout] == []
