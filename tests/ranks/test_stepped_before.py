"""Optimizers that have stepped, or made their states, before they are prepared; weights of any stage drawn anew by their places."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from user_loops import Loop, check, tried


ENV = {"ACCELERATE_USE_CPU": "true"}


def trained(loop: Loop, optimizer: torch.optim.Optimizer, left_out: tuple[int, ...], steps: int = 2) -> None:
    """Steps of the whole model, some of them without gradients of the MLPs, and three of the prepared one."""
    for index in range(steps):
        loop.model(**tiny.collate(tiny.rows(4))).loss.backward()
        for name, parameter in loop.model.named_parameters():
            if index in left_out and "mlp" in name:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    loop.prepare(optimizer)
    for index in range(3):
        loop.backward(index)
        loop.step()


def adamw(loop: Loop, left_out: tuple[int, ...] = ()) -> None:
    trained(loop, torch.optim.AdamW(loop.model.parameters(), lr=1e-2, eps=1e-4), left_out)


def adagrad(loop: Loop) -> None:
    """Makes its states when it is made."""
    trained(loop, torch.optim.Adagrad(loop.model.parameters(), lr=1e-2, initial_accumulator_value=0.1), (), steps=0)


def drawn_anew(loop: Loop) -> None:
    """A layer of each block, whichever stage has it, from one seeding."""
    loop.prepare()
    for index in range(3):
        loop.backward(index)
        loop.step()
        torch.manual_seed(7)
        for block in loop.model.model.layers:
            torch.nn.init.kaiming_uniform_(block.mlp.down_proj.weight, a=math.sqrt(5))
            with torch.no_grad():
                block.mlp.up_proj.weight.normal_(std=0.02)


CASES: dict[str, Callable[[Loop], None]] = {
    "adamw": adamw,
    "adagrad": adagrad,
    "unlike": functools.partial(adamw, left_out=(0,)),
    "without": functools.partial(adamw, left_out=(0, 1)),
    "drawn": drawn_anew,
}
UNLIKE = "had stepped before it was prepared, and its state step is"
DROPPED = "its gradient was dropped by p.grad = None, or it was frozen), and is stepped on now, with zero.stage=1"
EXPECTED = {
    ("adagrad", "tp2"): "",
    ("drawn", "pp2"): "",
}
MORE = {
    ("adamw", "zero1_offload"): "",
    ("adagrad", "zero1"): "",
    ("adagrad", "zero3"): "",
    ("unlike", "tp2"): "",
    ("unlike", "zero2"): UNLIKE,
    ("without", "zero1_offload"): DROPPED,
    ("without", "tp2"): "",
}
ON_FOUR = {
    ("adamw", "tp2_zero1"): "",
    ("adamw", "tp2_zero3"): "",
    ("adagrad", "tp2_zero1"): "",
    ("adagrad", "tp2_zero3"): "",
    ("drawn", "pp2_dp2"): "",
    ("drawn", "pp2_zero1"): "",
}


def many(rank: int, world_size: int, jobs: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{name}-{layout}": tried(layout, CASES[name]) for name, layout in jobs}


def run_all(expected: dict[tuple[str, str], str], world_size: int, folder: Path) -> list[dict[str, Any]]:
    alone = sorted({(name, "one") for name, _ in expected})
    options: dict[str, Any] = {"tmp_path": folder, "timeout": 200, "env": ENV}
    stock = run_ranks(many, 1, alone, init_group=False, **options)[0]
    return [found | stock for found in run_ranks(many, world_size, list(expected), **options)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_all(EXPECTED, 2, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_all(MORE, 2, tmp_path_factory.mktemp("more"))


@pytest.fixture(scope="module")
def runs_on_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_all(ON_FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(("name", "layout"), EXPECTED)
def test_right_or_refused(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    check(runs, name, layout, EXPECTED[name, layout])


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), MORE)
def test_more_is_right_or_refused(name: str, layout: str, more_runs: list[dict[str, Any]]) -> None:
    check(more_runs, name, layout, MORE[name, layout])


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), ON_FOUR)
def test_four_ranks_are_right(name: str, layout: str, runs_on_four: list[dict[str, Any]]) -> None:
    check(runs_on_four, name, layout, ON_FOUR[name, layout])
