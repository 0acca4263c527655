"""Adapters (PEFT) on a frozen model train as on one process, are saved as PEFT saves them, and resume.

If these fail, LoRA runs drift, export a whole model, or forget their adapters on resume.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import FIVE, same_folder
from trainer_cases import NO_NOISE, Case, compare, run_cases


pytestmark = pytest.mark.timeout(300)

PLAIN = Case("plain", model="llama_lora", steps=4, accumulation=2, arguments=NO_NOISE)
SMOOTHED = dataclasses.replace(PLAIN, arguments=NO_NOISE | {"label_smoothing_factor": 0.1}, evaluate=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2_recomputed": {"activation_checkpointing": {"every": 2}},
    "dp2_stage1": {"zero": {"stage": 1}},
    "dp2_stage3": {"zero": {"stage": 3}},
    "pp2": {"pp_size": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = [dataclasses.replace(PLAIN, name=name, parallel=parallel, save=True) for name, parallel in LAYOUTS.items()]
    stock = dataclasses.replace(PLAIN, name="stock", parallel=None, save=True)
    found = run_cases([stock], 1, tmp_path_factory.mktemp("stock"))
    found |= run_cases([dataclasses.replace(SMOOTHED, name="smoothed")], 1, tmp_path_factory.mktemp("smoothed"))
    smoothed = dataclasses.replace(SMOOTHED, name="pp2_smoothed", parallel={"pp_size": 2})
    return found | run_cases([*cases, smoothed], 2, tmp_path_factory.mktemp("two"))


def test_labels_of_a_wrapped_model_are_smoothed_as_those_of_the_model_inside(runs: dict[str, dict[str, Any]]) -> None:
    compare(runs["pp2_smoothed"], runs["smoothed"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_and_are_saved_as_on_one_process(name: str, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[name], runs["stock"])
    mine, stock = (Path(runs[run]["folder"]) / "final" for run in (name, "stock"))
    assert not (mine / "model.safetensors").exists()
    same_folder(mine, stock, "llama_lora")


@pytest.mark.parametrize(("saved", "resumed"), [("dp2", "dp2_stage1"), ("dp2_stage3", "pp2")])
def test_adapters_resume(saved: str, resumed: str, runs: dict[str, dict[str, Any]]) -> None:
    case = dataclasses.replace(PLAIN, name=saved, parallel=LAYOUTS[resumed], resume_at=2)
    folder = Path(runs[saved]["folder"])
    (folder / "parameters.safetensors").unlink()
    again = run_cases([case], 2, folder.parent)[saved]
    compare(again, runs["stock"])


MATRIX = {
    f"zero{stage}_{model}": Case(
        f"zero{stage}_{model}", model=model, steps=3, arguments=NO_NOISE, parallel={"zero": {"stage": stage}}
    )
    for stage in (1, 3)
    for model in FIVE
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    stock = [Case(model, model=model, steps=3, arguments=NO_NOISE, parallel=None) for model in FIVE]
    found = run_cases(stock, 1, tmp_path_factory.mktemp("one"))
    return found | run_cases(list(MATRIX.values()), 2, tmp_path_factory.mktemp("matrix"))


@pytest.mark.long
@pytest.mark.parametrize("name", MATRIX)
def test_adapters_on_shared_out_parameters_train_as_on_one_process(
    name: str, matrix: dict[str, dict[str, Any]]
) -> None:
    model = MATRIX[name].model
    compare(matrix[name], matrix[model])
    same_folder(*(Path(matrix[run]["folder"]) / "final" for run in (name, model)), model)
