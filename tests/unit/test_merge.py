"""A merged folder is the model of the checkpoint and nothing else.

If these fail, what is published has other weights than what was trained, or carries training state along.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from hf_parallel.checkpoints.folders import files_of, record, write_manifest
from hf_parallel.cli.main import app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-3"
    tiny.mixtral().save_pretrained(folder, max_shard_size="30KB")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "scheduler.pt").write_bytes(b"1")
    (folder / "training_state").mkdir()
    (folder / "training_state" / "__0_0.distcp").write_bytes(b"1")
    (folder / "tokenizer.json").write_text("{}")
    write_manifest(folder, record(folder, files_of(folder)), {})
    return folder


@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_a_merged_folder_loads_as_the_same_model(size: str, checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("merge", str(checkpoint), str(tmp_path / "out"), "--max-shard-size", size, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    out = tmp_path / "out"
    names = {"config.json", "generation_config.json", "tokenizer.json", *report["files"]}
    assert {path.name for path in out.iterdir()} == names | (
        set() if size == "50GB" else {"model.safetensors.index.json"}
    )
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_one_file_has_the_bytes_of_save_pretrained(checkpoint: Path, tmp_path: Path) -> None:
    assert invoke("merge", str(checkpoint), str(tmp_path / "out")).exit_code == 0
    tiny.mixtral().save_pretrained(tmp_path / "expected")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_a_damaged_checkpoint_is_named_and_nothing_is_left_behind(checkpoint: Path, tmp_path: Path) -> None:
    path = sorted(checkpoint.glob("model-*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 4)
    result = invoke("merge", str(checkpoint), str(tmp_path / "out"))
    assert result.exit_code == 1
    assert f"{path} has" in result.output
    assert "truncated or damaged" in result.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_folder_that_is_taken_and_one_without_a_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    assert "exists and is not empty" in invoke("merge", str(checkpoint), str(tmp_path / "taken")).output
    assert "has no config.json" in invoke("merge", str(tmp_path / "taken"), str(tmp_path / "out")).output
