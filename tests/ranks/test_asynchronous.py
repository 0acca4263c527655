"""Asynchronous schedules train as one process does whose gradients are made of older weights (`trainer_cases.Delayed`).

If a row fails, microbatches run with the weights of another step than they should, on one stage or in one direction, or
gradients of one window reach the update of another.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_cases import NO_NOISE, Case, compare, run_cases, wanted_cases


# All runs happen in the set-up of the first test.
pytestmark = pytest.mark.timeout(600)


def case_of(name: str, pp_size: int, parts: int, **more: Any) -> Case:
    schedule = more.pop("schedule", "pipedream_2bw")
    settings = {"pp_size": pp_size, "schedule": schedule, **({"num_microbatches": parts} if parts > 1 else {})}
    settings |= more.pop("settings", {})
    delay = pp_size - 1 if schedule == "pipedream" else 1
    return Case(name, parallel=settings, delay=delay, arguments={**NO_NOISE, **more.pop("arguments", {})}, **more)


DEFAULT = [
    case_of("2bw_pp2_m4", 2, 4, model="llama_tied", variable_length=True),
]
TWO = [
    case_of("2bw_pp2_m1", 2, 1, settings={"num_microbatches": 1}),
    case_of("2bw_pp2_windows", 2, 2, accumulation=2, count=40, steps=7, variable_length=True),
    case_of("2bw_pp2_recompute", 2, 4, arguments={"gradient_checkpointing": True}),
    case_of("2bw_pp2_evaluates", 2, 4, evaluate=True, metrics=True),
    case_of("2bw_pp2_gpt2", 2, 3, model="gpt2", variable_length=True, loss="func"),
    case_of("2bw_pp2_no_clip", 2, 4, clip=0.0),
    case_of("pipedream_pp2", 2, 1, schedule="pipedream"),
]
FOUR = [
    case_of("2bw_pp4_m3", 4, 3, model="llama_8", batch=6),
    case_of("2bw_pp4_m8", 4, 8, model="llama_8"),
    case_of("2bw_pp2_dp2", 2, 4, model="llama_tied", variable_length=True),
    case_of("pipedream_pp4", 4, 1, model="llama_8", schedule="pipedream"),
]


def runs_of(cases: list[Case], world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    stock = [dataclasses.replace(case, parallel=None, name=f"stock_{case.name}") for case in cases]
    return run_cases(stock, 1, folder / "stock") | run_cases(cases, world_size, folder / "mesh")


def compare_final(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    compare(mine, reference)
    found, expected = (load_file(Path(run["folder"]) / "final" / "model.safetensors") for run in (mine, reference))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        assert difference <= 1e-5, f"{name} differs by {difference:.1e} relative after the last step"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    two, four = wanted_cases(request, DEFAULT + TWO), wanted_cases(request, FOUR)
    found = runs_of(two, 2, tmp_path_factory.mktemp("two")) if two else {}
    return found | (runs_of(four, 4, tmp_path_factory.mktemp("four")) if four else {})


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.name)
def test_an_asynchronous_run_is_that_of_one_process_with_delayed_gradients(
    case: Case, runs: dict[str, dict[str, Any]]
) -> None:
    compare_final(runs[case.name], runs[f"stock_{case.name}"])


@pytest.mark.long
@pytest.mark.parametrize("case", TWO + FOUR, ids=lambda case: case.name)
def test_every_asynchronous_run_is_that_of_one_process_with_delayed_gradients(
    case: Case, runs: dict[str, dict[str, Any]]
) -> None:
    compare_final(runs[case.name], runs[f"stock_{case.name}"])
