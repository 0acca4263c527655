"""Adapters (PEFT) on a frozen model train as on one process, are saved as PEFT saves them, and resume.

If these fail, LoRA runs drift, export a whole model, or forget their adapters on resume.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import NO_NOISE, Case, compare, run_cases


pytestmark = pytest.mark.timeout(300)

PLAIN = Case("plain", model="llama_lora", steps=4, accumulation=2, arguments=NO_NOISE)
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
    return found | run_cases(cases, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_and_are_saved_as_on_one_process(name: str, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[name], runs["stock"])
    mine, stock = (Path(runs[run]["folder"]) / "final" for run in (name, "stock"))
    files = {"adapter_config.json", "adapter_model.safetensors"}
    assert files <= {path.name for path in mine.iterdir()}
    assert not (mine / "model.safetensors").exists()
    saved, expected = (load_file(folder / "adapter_model.safetensors") for folder in (mine, stock))
    assert saved.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("saved", "resumed"), [("dp2", "dp2_stage1"), ("dp2_stage3", "pp2")])
def test_adapters_resume(saved: str, resumed: str, runs: dict[str, dict[str, Any]]) -> None:
    case = dataclasses.replace(PLAIN, name=saved, parallel=LAYOUTS[resumed], resume_at=2)
    folder = Path(runs[saved]["folder"])
    (folder / "parameters.safetensors").unlink()
    again = run_cases([case], 2, folder.parent)[saved]
    compare(again, runs["stock"])
