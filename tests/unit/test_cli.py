"""The command line writes files that accelerate and we both accept, and fails with the library's own errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_parallel.cli.main import app
from hf_parallel.settings.recipes import list_recipes, load_recipe, read_section


def invoke(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=answers)


def test_config_writes_a_file_that_both_sides_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.yaml"
    sizes = ("--num-processes", "8", "--tp-size", "2", "--pp-size", "2", "--num-microbatches", "6")
    result = invoke("config", "--yes", "--output", str(path), *sizes, "--use-cpu")
    assert result.exit_code == 0, result.output
    assert "tp 2 x pp 2 x dp 2" in result.output
    assert load_recipe(path).pipeline.num_microbatches == 6
    _, accelerate = read_section(path)
    assert (accelerate["distributed_type"], accelerate["use_cpu"]) == ("MULTI_GPU", True)
    assert list(path.parent.iterdir()) == [path]


def test_config_asks_for_what_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    result = invoke("config", "--output", str(path), "--tp-size", "1", answers="4\n2\nauto\ny\nbf16\n")
    assert result.exit_code == 0, result.output
    assert load_recipe(path).pp_size == 2
    assert read_section(path)[1]["mixed_precision"] == "bf16"


def test_config_keeps_an_existing_file_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kept: 1\n")
    assert invoke("config", "--output", str(path), answers="n\n").exit_code == 1
    assert path.read_text() == "kept: 1\n"


@pytest.mark.parametrize("processes", ["1", "3"])
def test_config_writes_nothing_that_cannot_work(processes: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    result = invoke("config", "--yes", "--output", str(path), "--num-processes", processes, "--pp-size", "2")
    assert result.exit_code == 1
    assert "Set num_processes to" in result.output or "distributed_type='NO'" in result.output
    assert list(tmp_path.iterdir()) == []


def test_validate_reports_the_layout_or_every_problem(tmp_path: Path) -> None:
    assert "valid, tp 2 x pp 2 x dp 1" in invoke("validate", "cpu_pp2_tp2").output
    facts = json.loads(invoke("validate", "cpu_pp2", "--json").output)
    assert (facts["valid"], facts["dp_size"], facts["config"]["pp_size"]) == (True, 1, 2)
    bad = tmp_path / "bad.yaml"
    bad.write_text("parallelism_config: {hf_parallel: {pp_size: 0, zero: {engine: deepsped}}}\n")
    result = invoke("validate", str(bad))
    assert result.exit_code == 1
    assert "pp_size=0" in result.output
    assert "zero.engine='deepsped': expected 'auto', 'native', 'fsdp2' or 'deepspeed'" in result.output
    assert json.loads(invoke("validate", str(bad), "--json").output)["valid"] is False


def test_recipes_lists_them_all() -> None:
    assert [row["name"] for row in json.loads(invoke("recipes", "--json").output)] == list_recipes()
    assert "cpu_pp2_dp2" in invoke("recipes").output
    assert Path(invoke("recipes", "cpu_pp2").output.strip()).name == "cpu_pp2.yaml"
    assert "Did you mean cpu_pp2?" in invoke("recipes", "cpu_pp3").output
