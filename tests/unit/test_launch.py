"""A worker finds the settings its launcher was given, and never trains alone by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_parallel import worker
from hf_parallel.errors import ConfigError
from hf_parallel.settings import launch
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import find_recipe


ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
distributed_type: MULTI_GPU
num_processes: 2
main_process_port: 0
use_cpu: true
parallelism_config:
  hf_parallel: {pp_size: 2}
"""
# Stands for a launcher: a process whose command line is the launcher's, and which changes its children's folder.
FAKE_LAUNCHER = """
import os, subprocess, sys
sys.exit(subprocess.run([sys.executable, os.environ["WORKER"]], cwd=os.environ["ELSEWHERE"]).returncode)
"""
WORKER = """
import json
from hf_parallel.settings.launch import find_launch
found = find_launch()
print(json.dumps([found.path and str(found.path), found.source, found.launched_by, found.world_size]))
"""


def started_by(command: list[str], tmp_path: Path, **variables: str) -> list[object]:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.yaml").write_text(RECIPE)
    for program in ("accelerate", "accelerate-launch", "torchrun"):
        (tmp_path / program).write_text(FAKE_LAUNCHER)
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "WORKER": str(tmp_path / "worker.py"),
        "ELSEWHERE": str(tmp_path / "elsewhere"),
        "HF_HOME": str(tmp_path / "hf_home"),
    }
    result = subprocess.run(
        [sys.executable, *command], env=env | variables, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    found: list[object] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two processes; each test says which launcher it has by patching `_launcher_of`."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "_launcher_of", lambda process: ("none", None))
    return monkeypatch


@pytest.mark.parametrize(
    "command",
    [
        ["accelerate", "launch", "--config_file", "mine.yaml", "train.py", "--config_file", "decoy.yaml"],
        ["accelerate-launch", "--config-file=mine.yaml", "-m", "train"],
    ],
)
def test_the_file_on_the_launchers_command_line_is_found(command: list[str], tmp_path: Path) -> None:
    expected = [str(tmp_path / "mine.yaml"), "accelerate launch", "accelerate", 2]
    assert started_by(command, tmp_path, LOCAL_RANK="0", WORLD_SIZE="2") == expected


def test_accelerates_default_file_is_found(tmp_path: Path) -> None:
    default = tmp_path / "hf_home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(RECIPE)
    assert started_by(["accelerate", "launch", "train.py"], tmp_path)[:2] == [str(default), "accelerate launch"]


def test_the_variable_wins_over_the_launcher(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched.setattr(launch, "_launcher_of", lambda process: ("accelerate", tmp_path / "mine.yaml"))
    launched.setenv("HF_PARALLEL_CONFIG", "cpu_pp2_tp2")
    found = launch.find_launch()
    assert (found.path, found.source) == (find_recipe("cpu_pp2_tp2"), "env HF_PARALLEL_CONFIG")
    assert (found.launched_by, found.rank, found.world_size) == ("accelerate", 1, 2)


def test_a_machine_without_ranks_is_refused(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(
        ConfigError, match=r"LOCAL_WORLD_SIZE=0: a machine has one rank or more\. Let the launcher set it"
    ):
        launch.resolve_config({"pp_size": 2})


def test_torchrun_is_recognised_and_has_no_file(tmp_path: Path) -> None:
    assert started_by(["torchrun", "train.py"], tmp_path, LOCAL_RANK="0", WORLD_SIZE="2") == [
        None,
        "none",
        "torchrun",
        2,
    ]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["python", "/x/bin/accelerate", "launch", "a.py"], ["a.py"]),
        (["python", "-m", "accelerate.commands.launch", "a.py"], ["a.py"]),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "a.py"], ["a.py"]),
        (["python", "/x/site-packages/accelerate/commands/launch.py", "a.py"], ["a.py"]),
        (["/x/bin/accelerate-launch", "a.py"], ["a.py"]),
        (["python", "/x/bin/accelerate", "config", "update"], None),
        (["python", "train.py"], None),
        (["accelerate"], None),
        ([], None),
    ],
)
def test_every_spelling_of_the_launcher_is_known(command: list[str], arguments: list[str] | None) -> None:
    assert launch._accelerate_arguments(command) == arguments


def test_an_argument_wins_over_variable_and_launcher(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("HF_PARALLEL_CONFIG", "cpu_dp2")
    assert launch.resolve_config("cpu_pp2")[0].pp_size == 2
    assert launch.resolve_config({"tp_size": 2})[0].tp_size == 2
    assert launch.resolve_config(HFParallelConfig(pp_size=2))[0].pp_size == 2
    assert launch.resolve_config()[0] == HFParallelConfig()


def test_the_explanation_names_layout_and_origin(launched: pytest.MonkeyPatch) -> None:
    config, why = launch.resolve_config("cpu_pp2", num_microbatches=8)
    assert config.pipeline.num_microbatches == 8
    assert "tp 1 x pp 2 x dp 1 over 2 processes" in why
    assert "cpu_pp2.yaml (argument) with num_microbatches overridden" in why


def test_accelerate_without_our_section_is_data_parallel(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    for found, reason in ((path, "has no parallelism_config.hf_parallel section"), (None, "no config file was given")):
        launched.setattr(launch, "_launcher_of", lambda process, found=found: ("accelerate", found))
        config, why = launch.resolve_config()
        assert config == HFParallelConfig()
        assert "pure data parallelism over 2 processes" in why
        assert reason in why


def test_one_process_without_settings_is_not_parallel() -> None:
    config, why = launch.resolve_config()
    assert config.model_parallel_size == 1
    assert "nothing is parallel (one process)" in why


def test_torchrun_without_settings_names_the_three_ways_in(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(launch, "_launcher_of", lambda process: ("torchrun", None))
    with pytest.raises(ConfigError, match=r"accelerate launch --config_file.*HF_PARALLEL_CONFIG=.*HFParallelCallback"):
        launch.resolve_config()
    assert launch.resolve_config(pp_size=2)[0].pp_size == 2


def test_an_explicit_file_without_our_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("num_processes: 2\n")
    with pytest.raises(ConfigError, match=r"plain\.yaml \(argument\): it has no parallelism_config\.hf_parallel"):
        launch.resolve_config(path)


def test_a_layout_in_one_process_says_how_to_start_more() -> None:
    with pytest.raises(ConfigError, match=r"num_processes=1 is below .*start 4 with `accelerate launch`"):
        launch.resolve_config("cpu_pp2_tp2")


def test_the_started_world_counts_not_the_number_in_the_file(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"num_processes=3 is not a multiple"):
        launch.resolve_config("cpu_pp2")
    launched.setenv("WORLD_SIZE", "4")
    assert "dp 2" in launch.resolve_config("cpu_pp2")[1]


def test_an_engine_that_wraps_the_whole_model_is_refused(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"distributed_type='FSDP' with tp_size=1 and pp_size=2"):
        launch.resolve_config(pp_size=2)


def test_a_bad_variable_is_named(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("HF_PARALLEL_CONFIG", "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"HF_PARALLEL_CONFIG: 'nowhere\.yaml': this file does not exist"):
        launch.resolve_config()


def test_a_worker_without_accelerator_is_told_to_use_the_cpu(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(worker, "has_accelerator", lambda: False)
    launched.delenv("ACCELERATE_USE_CPU", raising=False)
    worker.prepare_worker()
    assert os.environ.pop("ACCELERATE_USE_CPU") == "true"
    launched.setenv("ACCELERATE_USE_CPU", "false")
    worker.prepare_worker()
    assert os.environ["ACCELERATE_USE_CPU"] == "false"


@pytest.mark.parametrize("use_cpu", [True, False])
def test_use_cpu_of_the_file_reaches_a_worker_with_an_accelerator(
    use_cpu: bool, launched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE if use_cpu else RECIPE.replace("use_cpu: true", "use_cpu: false"))
    launched.setattr(launch, "_launcher_of", lambda process: ("accelerate", path))
    launched.setattr(worker, "has_accelerator", lambda: True)
    worker.prepare_worker()
    assert os.environ.pop("ACCELERATE_USE_CPU", None) == ("true" if use_cpu else None)


def test_a_bad_file_ends_the_worker_at_import(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("pp_size: 2", "pp_size: 3"))
    launched.setattr(launch, "_launcher_of", lambda process: ("accelerate", path))
    with pytest.raises(ConfigError, match=r"(?s)mine\.yaml \(accelerate launch\):.*num_processes=2 is below"):
        worker.prepare_worker()


def test_a_process_nobody_launched_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "find_launch", None)
    worker.prepare_worker()
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_workers_without_a_process_group_are_refused(launched: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 but .*every rank would train alone.*ACCELERATE_USE_CPU=true"):
        launch.check_world(HFParallelConfig())


def test_an_accelerate_that_counts_another_world_is_refused() -> None:
    launch.check_world(HFParallelConfig(), accelerate_processes=1)
    with pytest.raises(
        ConfigError, match=r"accelerate counts 2 process but torch.distributed connects 1.*notebook import hf_parallel"
    ):
        launch.check_world(HFParallelConfig(), accelerate_processes=2)


def test_one_process_is_a_world_for_one_process_only() -> None:
    launch.check_world(HFParallelConfig())
    with pytest.raises(ConfigError, match=r"start 2 with `accelerate launch`"):
        launch.check_world(HFParallelConfig(pp_size=2))


TRAINING_SCRIPT = """
import json, os, sys
import hf_parallel
from accelerate import Accelerator
from hf_parallel.settings.launch import check_world, resolve_config
config, why = resolve_config()
state = Accelerator().state
check_world(config, state.num_processes)
line = json.dumps([state.num_processes, str(state.device), why])
open(os.path.join(sys.argv[1], f"rank{state.process_index}.json"), "w").write(line)
"""


@pytest.mark.launch
def test_accelerate_launch_connects_its_cpu_workers_with_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING_SCRIPT)
    command = ["-m", "accelerate.commands.launch", "--config_file", str(find_recipe("cpu_pp2")), "train.py", "."]
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        world_size, device, why = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (world_size, device.split(":")[0]) == (2, "cpu")
        assert "pp 2 x dp 1 over 2 processes" in why
        assert "cpu_pp2.yaml (accelerate launch)" in why


def test_a_mapping_and_its_overrides_are_settings_only_together() -> None:
    from hf_parallel.settings.launch import resolve_config

    config, origin = resolve_config(
        {"pipeline": {"num_microbatches": 3}, "tensor_parallel": {}}, pp_size=1, num_microbatches="auto"
    )
    assert config.pipeline.num_microbatches == "auto"
    assert "overridden in code" in origin
    with pytest.raises(ConfigError, match=r"num_microbatches=3 with pp_size=1 has no effect"):
        resolve_config({"pipeline": {"num_microbatches": 3}})
