"""DeepSpeed drives a stock Trainer with our settings: losses are those of plain data parallelism, folders load, runs resume.

Needs DeepSpeed and a compiler: `make test-deepspeed`. Its ops are built once, before any rank starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import ENV, Case, make_trainer


pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
STEPS = 4


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero": {"engine": "deepspeed", "stage": stage, **more}}


BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}
CASES = [
    Case("stage1", parallel=zero(1)),
    Case("stage2", parallel=zero(2)),
    Case("stage3", parallel=zero(3)),
    Case("stage1_cpu", parallel=zero(1, offload_optimizer="cpu")),
    Case("stage2_cpu", parallel=zero(2, offload_optimizer="cpu")),
    Case("stage3_cpu", parallel=zero(3, offload_optimizer="cpu")),
    Case("stage3_both", parallel=zero(3, **BOTH)),
    Case("stage2_small_messages", parallel=zero(2) | {"data_parallel": {"bucket_cap_mb": 0.01, "overlap": False}}),
]


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    """Build what the ranks would build otherwise, each waiting for the other."""
    from hf_parallel.deepspeed.ops import CPU_ADAM, SHARED_MEMORY, build

    os.environ["DS_ACCELERATOR"] = "cpu"
    build([SHARED_MEMORY, CPU_ADAM])


def train(rank: int, world_size: int, case: Case, folder: str, resume: bool = False) -> dict[str, Any]:
    trainer = make_trainer(case, Path(folder), world_size)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "final"))
    engine = trainer.model_wrapped
    keys = ("loss", "grad_norm", "learning_rate")
    return {
        "engine": type(engine).__name__,
        "optimizer": type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__ if case.parallel else "",
        "history": [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history],
    }


def launched(case: Case, folder: Path, resume: bool = False) -> dict[str, Any]:
    results = run_ranks(train, 2, case, str(folder), resume, tmp_path=folder.parent, timeout=300, env=ENV)
    return results[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("ddp") / "run"
    return launched(shaped(Case("ddp", parallel=None)), folder), folder


def shaped(case: Case) -> Case:
    return dataclasses.replace(case, steps=STEPS, accumulation=2, clip=0.5)


def assert_equal(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    assert len(mine["history"]) == len(reference["history"])
    for step, (here, there) in enumerate(zip(mine["history"], reference["history"], strict=True)):
        assert here.keys() == there.keys()
        for key, value in there.items():
            assert here[key] == pytest.approx(value, abs=1e-5), f"{key} of log {step}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_norms_and_weights_are_those_of_data_parallelism(
    case: Case, reference: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    expected, folder = reference
    result = launched(shaped(case), tmp_path / "run")
    assert result["engine"] == "DeepSpeedEngine"
    assert result["optimizer"] == ("DeepSpeedCPUAdam" if "cpu" in case.name or "both" in case.name else "AdamW")
    assert_equal(result, expected)
    mine, theirs = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", folder))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
