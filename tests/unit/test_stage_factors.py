"""Factors that stages scaled their gradients with, where user code took numbers of single gradients."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.scaled import StageFactors


def word(before: dict[str, float], now: dict[str, float | None], pp_size: int = 2) -> int:
    mesh: Any = SimpleNamespace(shape=SimpleNamespace(pp_size=pp_size), pp_group=None)
    factors = StageFactors(mesh, mesh)
    for name, value in before.items():
        factors.take(name, functools.partial(torch.tensor, value, dtype=torch.float64))
    found = {name: None if value is None else torch.tensor(value, dtype=torch.float64) for name, value in now.items()}
    word = factors.word(found.__getitem__)
    return 0 if word is None else int(word)


def test_one_factor_for_all_gradients_is_told() -> None:
    half, third = word({"a": 4.0, "b": 8.0}, {"a": 1.0, "b": 2.0}), word({"a": 9.0, "b": 1.0}, {"a": 1.0, "b": 1 / 9})
    assert half
    assert half != third
    assert half == word({"c": 1.0, "d": 16.0}, {"c": 0.25, "d": 4.0})
    mesh: Any = SimpleNamespace(shape=SimpleNamespace(pp_size=2))
    judge = StageFactors(mesh, mesh)
    judge.refuse_unlike([half, half])
    judge.refuse_unlike([half, 0])
    with pytest.raises(UnsupportedError, match=r"0\.5 and 0\.3333 on different stages"):
        judge.refuse_unlike([half, third])


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {}),
        ({"a": 4.0}, {"a": 1.0}),
        ({"a": 4.0, "b": 8.0}, {"a": 1.0, "b": 8.0}),
        ({"a": 4.0, "b": 8.0}, {"a": 1.0, "b": None}),
        ({"a": 4.0, "b": 0.0}, {"a": 1.0, "b": 2.0}),
    ],
    ids=["no_number", "one", "one_of_two", "dropped", "from_nothing"],
)
def test_anything_else_says_nothing(before: dict[str, float], now: dict[str, float | None]) -> None:
    assert word(before, now) == 0


@pytest.mark.parametrize("now", [{"a": 0.0, "b": 0.0}, {"a": None, "b": None}], ids=["cleared", "dropped"])
def test_a_step_that_one_stage_leaves_out_is_refused(now: dict[str, float | None]) -> None:
    before = {"a": 4.0, "b": 8.0}
    mesh: Any = SimpleNamespace(shape=SimpleNamespace(pp_size=2))
    judge = StageFactors(mesh, mesh)
    left_out, kept = word(before, now), word(before, dict(before))
    judge.refuse_unlike([left_out, left_out])
    with pytest.raises(UnsupportedError, match="which is 0 and 1 on different stages"):
        judge.refuse_unlike([left_out, kept])


def test_a_model_without_stages_says_nothing() -> None:
    assert word({"a": 4.0, "b": 8.0}, {"a": 1.0, "b": 2.0}, pp_size=1) == 0
