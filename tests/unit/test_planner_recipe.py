"""Plans are written as recipes that validate, read back as the same layout, and train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_parallel import Cluster, plan
from hf_parallel.cli.main import app
from hf_parallel.errors import ConfigError
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of, rows_of, settings_of
from hf_parallel.settings.config import HFParallelConfig


ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [
    {"tp": 2, "dp": 4, "zero": 1, "num_microbatches": 3},
    {"pp": 2, "dp": 4, "num_microbatches": 8, "micro_batch": 2, "recompute": "full"},
    {"pp": 4, "tp": 2, "num_microbatches": 8, "schedule": "zbv_zero_bubble"},
    {"pp": 2, "dp": 4, "num_microbatches": 8, "split": [3, 5]},
    {"pp": 2, "tp": 2, "dp": 2, "num_microbatches": 8, "schedule": "interleaved_1f1b", "stages_per_rank": 3},
    {"dp": 8, "zero": 3, "recompute": "selective", "micro_batch": 4},
    {"dp": 8, "zero": 2, "dtype": "fp16", "sequence_parallel": False, "kernels": "compiled"},
    {"tp": 8, "sequence_parallel": True, "dtype": "fp32"},
    {"dp": 8, "compression": "powersgd", "overlap_dp": False},
    {"dp": 8, "zero": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_settings_of_a_layout_mean_that_layout(layout: dict[str, object]) -> None:
    spec = layout_of(layout)
    config = settings_of(spec)
    assert layout_of(mapping_of(config, 8, rows_of(spec), spec.dtype)) == spec


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_updated_parameters_arrive_when_the_settings_say(stage: int, late: bool) -> None:
    config = HFParallelConfig.from_mapping({"zero": {"stage": stage, "overlap_gather": late}}, source="test")
    spec = layout_of(mapping_of(config, 4, 1, "bf16"))
    assert spec.gathers_late is late
    assert settings_of(spec).zero.overlap_gather is late


def test_plans_take_parameters_to_arrive_as_they_do_by_default() -> None:
    config = LlamaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=1024)
    cluster = Cluster(1, 4, "rtx3090")
    for kernels, late in (("eager", False), ("fused", True)):
        given = {"zero": 1, "tp": 1, "pp": 1, "kernels": kernels}
        (first, *_) = plan(config, cluster, seq_len=128, global_batch=8, layout=given)
        assert first.spec.overlap_gather is late


def test_what_this_package_does_not_run_is_not_written() -> None:
    spec = LayoutSpec(loss="fused", dtype="fp8", kernels="fused", overlap_pp=True, state_bytes=(2, 4, 12))
    with pytest.raises(ConfigError, match=r"(?s)overlap_pp=true.*state_bytes=.*loss=.*dtype=fp8.*kernels=fused"):
        settings_of(spec)


def _planned(folder: Path, *options: str) -> Path:
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        vocab_size=128,
    )
    config.save_pretrained(folder)
    path = folder / "recipe.yaml"
    fixed = ["--gpu", "cpu", "--seq", "32", "--batch", "8", "--write", str(path), "--model", str(folder)]
    result = CliRunner().invoke(app, ["plan", *fixed, *options])
    assert result.exit_code == 0, result.output
    return path


def test_what_is_written_validates(tmp_path: Path) -> None:
    path = _planned(tmp_path, "--gpus-per-node", "4", "--layout", "pp=2,tp=2,dtype=fp32")
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert (facts["num_processes"], facts["tp_size"], facts["pp_size"]) == (4, 2, 2)
    assert "predicted, not measured" in path.read_text()
    assert re.search(r"# Change: .*Planned with pipeline\.split: \[[\d, ]+\]\.", path.read_text())


def test_a_layout_that_cannot_run_writes_nothing(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128).save_pretrained(tmp_path)
    path = tmp_path / "recipe.yaml"
    options = ["--model", str(tmp_path), "--gpu", "h100", "--seq", "32", "--batch", "8", "--write", str(path)]
    result = CliRunner().invoke(app, ["plan", *options, "--why", "kernels=fused"])
    assert result.exit_code == 1
    assert "kernels=fused" in result.output
    assert not path.exists()


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("layout", [pytest.param("pp=2", marks=pytest.mark.slow), "tp=2", "dp=2,zero=1,micro_batch=2"])
def test_what_is_written_trains(tmp_path: Path, layout: str) -> None:
    path = _planned(tmp_path, "--gpus-per-node", "2", "--layout", f"{layout},dtype=fp32")
    script = tmp_path / "train.py"
    (rows,) = re.findall(r"per_device_train_batch_size=(\d+)", path.read_text())
    script.write_text(TRAIN.format(folder=str(tmp_path), rows=rows))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 4
    assert losses[-1] < losses[0]


TRAIN = """
import json, torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
import hf_parallel

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r}))
ids = torch.randint(0, 128, (8, 32))
rows = [dict(input_ids=row, labels=row) for row in ids] * 4
arguments = TrainingArguments(
    output_dir={folder!r} + "/out", per_device_train_batch_size={rows}, max_steps=4, logging_steps=1,
    learning_rate=1e-2, report_to="none", save_strategy="no", use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[hf_parallel.HFParallelCallback()])
trainer.train()
if trainer.is_world_process_zero():
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    json.dump(losses, open({folder!r} + "/losses.json", "w"))
"""
