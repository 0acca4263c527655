"""`hf-parallel test` passes a file that trains as one process, and fails one whose processes train alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.cli.try_file import judge, settings_of
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig


SAME = {"losses": [2.0, 1.5], "ranks": [(0, 11), (1, 12)]}
ONE = {"losses": [2.0, 1.5], "ranks": [(0, 13)]}
FILE: dict[str, Any] = {"num_processes": 2, "use_cpu": True, "mixed_precision": "no"}


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cpu_pp2", "cpu_dp2_int8"])
def test_a_file_that_trains_passes(recipe: str) -> None:
    result = CliRunner().invoke(app, ["test", recipe, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert len(found["losses"]) == 10
    assert found["losses"][-1] < found["losses"][0]


def test_processes_that_trained_alone_do_not_pass() -> None:
    """Each reports the same rank; the losses may well be equal."""
    alone = SAME | {"ranks": [(0, 11)]}
    found = judge(HFParallelConfig(pp_size=2), FILE, alone, ONE)
    assert not found["ok"]
    assert "1 of 2 processes trained together" in found["text"]


@pytest.mark.parametrize(
    ("losses", "config", "ok"),
    [
        ([2.0, 1.5], {}, True),
        ([2.0, 1.5 * (1 + 9e-6)], {}, True),
        ([2.0, 1.5 * (1 + 2e-5)], {}, False),
        ([2.0, 1.5 * (1 + 2e-5)], {"gradient_compression": {"method": "int8"}}, True),
        ([2.1, 1.5], {"gradient_compression": {"method": "int8"}}, False),
        ([2.0], {}, False),
        ([2.0, float("nan")], {}, False),
        ([], {}, False),
    ],
)
def test_losses_are_compared_with_one_process(losses: list[float], config: dict[str, Any], ok: bool) -> None:
    assert judge(HFParallelConfig(**config), FILE, SAME | {"losses": losses}, ONE)["ok"] is ok


def test_the_model_of_the_test_fits_the_layout() -> None:
    config = HFParallelConfig(pp_size=2, tp_size=3, pipeline={"schedule": "zbv", "num_microbatches": 6})
    found = settings_of(config, FILE | {"num_processes": 12})
    assert (found["blocks"], found["heads"], found["rows"], found["replicas"]) == (4, 12, 6, 2)
    split = HFParallelConfig(pp_size=2, pipeline={"split": [1, 2]})
    assert settings_of(split, FILE)["blocks"] == 3


def test_what_this_machine_cannot_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"num_machines=2: a test starts processes on this machine alone\. Try a file"
    ):
        settings_of(HFParallelConfig(), FILE | {"num_machines": 2})
    with pytest.raises(ConfigError, match=r"Set num_processes in the file"):
        settings_of(HFParallelConfig(), {"use_cpu": True})
    path = tmp_path / "bad.yaml"
    path.write_text(
        yaml.safe_dump({"distributed_type": "MULTI_GPU", "parallelism_config": {"hf_parallel": {"pp_size": 0}}})
    )
    result = CliRunner().invoke(app, ["test", str(path), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (1, False)


def test_a_file_whose_stages_step_at_different_times_is_tried_without_a_norm() -> None:
    apart = HFParallelConfig(pp_size=2, pipeline={"schedule": "pipedream", "vertical_sync": False})
    assert settings_of(apart, FILE)["clip"] == 0.0
    assert settings_of(HFParallelConfig(pp_size=2), FILE)["clip"] == 1.0
