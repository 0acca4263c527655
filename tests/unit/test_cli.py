"""The command line writes files that accelerate and we both accept, and fails with the library's own errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import hf_parallel
from hf_parallel.cli.adapters_option import AdaptersCommand
from hf_parallel.cli.main import COMMANDS, app
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
    answers = "y\n1\n4\nn\n2\nzbv\nauto\n1\nnone\n2\nbf16\n"
    result = invoke("config", "--output", str(path), "--tp-size", "1", answers=answers)
    assert result.exit_code == 0, result.output
    config = load_recipe(path)
    assert (config.pp_size, config.pipeline.schedule, config.zero.stage) == (2, "zbv_zero_bubble", 1)
    assert config.activation_checkpointing.every == 2
    assert read_section(path)[1]["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ("y\n1\n0\n2\n" + "\n" * 9, "num_processes=0: expected an integer of 1 or more"),
        ("y\n1\ntwo\n2\n" + "\n" * 9, "num_processes='two': expected an integer"),
        ("y\n1\n4\nn\n3\n2\n" + "\n" * 9, "num_processes=4 is not a multiple of tp_size * pp_size = 1 * 3 = 3"),
        ("y\n1\n4\nn\n1\n1\n5\n0\n" + "\n" * 9, "zero.stage=5: expected an integer from 0 to 3. Set zero.stage to 3."),
        ("y\n1\n2\nn\n1\n1\n0\n0\nfp8\nbf16\n", "mixed_precision='fp8': expected no, bf16 or fp16"),
        ("y\n1\n2\nn\n1\n1\n0\n0\nfp16\nbf16\n", "mixed_precision='fp16' with use_cpu=true"),
        ("y\n2\na\n3\n4\n" + "\n" * 9, "num_processes=3 with num_machines=2"),
        ("y\n2\na\n4\nn\n1\n4\n2\n" + "\n" * 9, "tp_size=4 with num_processes=4 on num_machines=2"),
    ],
)
def test_config_checks_each_answer_when_it_is_given(answers: str, says: str, tmp_path: Path) -> None:
    """What is refused is asked again, and the file is written from the answers that stand."""
    path = tmp_path / "mine.yaml"
    result = invoke("config", "--output", str(path), answers=answers)
    assert says in result.output
    assert result.exit_code == 0, result.output
    assert load_recipe(path)


def test_config_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    answers = "y\n1\n8\nb\n4\nn\n2\nback\n4\n" + "\n" * 9  # back to the processes, then to the stages
    result = invoke("config", "--output", str(path), answers=answers)
    assert result.exit_code == 0, result.output
    assert read_section(path)[1]["num_processes"] == 4
    assert load_recipe(path).pp_size == 4


def test_config_leaves_the_layout_to_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert invoke("config", "--yes", "--output", str(path), "--auto", "--use-cpu").exit_code == 0
    assert load_recipe(path).layout == "auto"
    refused = invoke("config", "--yes", "--output", str(path), "--auto", "--pp-size", "2")
    assert (refused.exit_code, "--pp-size has no effect" in refused.output) == (1, True)


def test_config_writes_for_several_machines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    machines = ("--num-machines", "2", "--main-process-ip", "10.0.0.1", "--num-processes", "4", "--pp-size", "2")
    assert invoke("config", "--yes", "--output", str(path), *machines, "--use-cpu").exit_code == 0
    accelerate = read_section(path)[1]
    found = [accelerate[key] for key in ("num_machines", "main_process_ip", "main_process_port")]
    assert found == [2, "10.0.0.1", 29500]


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


def test_recipes_says_what_each_does_besides_its_layout() -> None:
    rows = {row["name"]: row for row in json.loads(invoke("recipes", "--json").output)}
    assert (
        rows["budget_3090"]["also"]
        == "ZeRO 3, offload of optimizer and parameters to cpu, checkpointing every 2, bf16"
    )
    head = Path(invoke("recipes", "budget_3090").output.strip()).read_text()
    memory = rows["budget_3090"]["gpu_memory"]
    assert re.fullmatch(r"\d\.\d GB of 24", memory)
    assert f"= {memory}." in head
    assert rows["cpu_dp2_int8"]["also"] == "gradients int8"
    assert rows["cpu_pp2_zbv"]["also"] == "zbv_zero_bubble"
    output = " ".join(invoke("recipes").output.split())
    assert "ZeRO 3, offload of optimizer and parameters to cpu" in output
    assert memory in output


def test_every_command_s_line_of_help_is_there_and_its_module_is_found() -> None:
    listed = invoke("--help").output
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        assert invoke(name, "--help").exit_code == 0
    assert invoke("--version").output == f"hf_parallel {hf_parallel.__version__}\n"


def test_only_commands_that_count_adapters_read_their_arguments_in_another_way() -> None:
    group: Any = get_command(app)
    kinds = {name: type(group.get_command(None, name)) for name in COMMANDS}
    assert {name for name, kind in kinds.items() if kind is AdaptersCommand} == {"plan", "validate"}


def test_help_imports_no_command() -> None:
    """`--help` is there in a moment: nothing that takes long to import is imported."""
    heavy = "{'torch', 'transformers', 'accelerate', 'pydantic', 'yaml', 'rich'}"
    code = f"import sys, hf_parallel.cli.main as m\ntry: m.app(['--help'])\nexcept SystemExit: print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n"), done.stdout[-200:]


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_parallel", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"hf_parallel {hf_parallel.__version__}\n"


def test_json_has_no_log_lines_in_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed logs to stdout when it is imported; a compiler that it starts does so too."""

    def noisy() -> None:
        print("a log line")
        os.write(1, b"a line of another process\n")

    monkeypatch.setattr("hf_parallel.cli.export.zero_keys", noisy)
    main = get_command(app)
    with pytest.raises(SystemExit) as ended:
        main(["export", "cpu_dp2_zero1", "--to", "deepspeed"])
    captured = capfd.readouterr()
    assert ended.value.code == 0
    assert json.loads(captured.out)["zero_optimization"]["stage"] == 1
    assert "a line of another process" in captured.err


def test_init_gives_the_script_experts_where_a_recipe_spreads_them(tmp_path: Path) -> None:
    result = invoke("init", str(tmp_path), "--recipe", "cpu_ep2")
    assert f"{tmp_path}/train.py --experts 4\n" in result.output
    assert "cpu_ep2.yaml train.py --experts 4\n" in (tmp_path / "cpu_ep2.yaml").read_text()


def test_init_writes_a_folder_that_can_be_launched(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    result = invoke("init", str(folder))
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {"train.py", "cpu_pp2.yaml", "settings.schema.json"}
    assert load_recipe(folder / "cpu_pp2.yaml") == load_recipe("cpu_pp2")
    assert invoke("validate", str(folder / "cpu_pp2.yaml")).exit_code == 0
    assert (folder / "cpu_pp2.yaml").read_text().startswith("# yaml-language-server: $schema=settings.schema.json\n")
    assert "accelerate launch --config_file cpu_pp2.yaml train.py" in (folder / "cpu_pp2.yaml").read_text()
    again = invoke("init", str(folder))
    assert (again.exit_code, "it has train.py, cpu_pp2.yaml, settings.schema.json already" in again.output) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["init", "PLACE", "--recipe", "cpu_pp2"],
        ["config", "--yes", "--use-cpu", "--num-processes", "2", "--output", "PLACE/new.yaml"],
        ["config", "--yes", "--use-cpu", "--num-processes", "2", "--output", "FOLDER"],
        ["schedule", "--csv", "PLACE/new.csv"],
        ["verify", "nothing", "--json", "PLACE/new.json"],
        ["verify", "nothing", "--json", "FOLDER"],
    ],
)
def test_a_place_that_cannot_be_written_is_named_without_a_traceback(arguments: list[str], tmp_path: Path) -> None:
    place, folder = tmp_path / "file", tmp_path / "folder"
    place.touch()
    (folder / "within").mkdir(parents=True)
    given = [part.replace("PLACE", str(place)).replace("FOLDER", str(folder)) for part in arguments]
    result = invoke(*given)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert re.search("cannot be written", result.output), result.output
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder", "within"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.json", "--pp", "2"], "nothing.json"),
        (["--script", "nothing.py", "--dp", "2"], "there is no file"),
        (["--script", "nothing.py", "--script-args", "'half"], "No closing quotation"),
        (["config.json", "--dtype", "fp8"], "expected one of fp32, bf16, fp16"),
    ],
)
def test_arguments_that_cannot_be_verified_are_told_in_json_too(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("-", "verdict.json"):
        result = invoke("verify", *arguments, "--json", place)
        assert result.exit_code == 3, result.output
        verdict = json.loads(result.stdout if place == "-" else Path(place).read_text())
        assert told in verdict["refused"]
        assert not verdict["ok"]


@pytest.mark.parametrize(
    ("package", "extra", "exit_code", "arguments"),
    [
        ("deepspeed", "deepspeed", 1, ["prebuild", "cpu_dp2_deepspeed"]),
        ("deepspeed", "deepspeed", 0, ["validate", "cpu_dp2_deepspeed"]),
        ("matplotlib", "viz", 1, ["plan", "--model", "nothing", "--gpu", "h100", "--seq", "8", "--batch", "8", "--plot", "p.svg"]),
    ],
)  # fmt: skip
def test_without_an_optional_package_a_command_names_the_extra(
    package: str, extra: str, exit_code: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    result = invoke(*arguments)
    assert (result.exit_code, f"pip install 'hf_parallel[{extra}]'" in result.output) == (exit_code, True), (
        result.output
    )


def test_a_misspelt_command_is_told_the_nearest() -> None:
    for typed, meant in (("valdate", "validate"), ("dryrun", "dry-run")):
        result = invoke(typed, "file.yaml")
        assert (result.exit_code, f"Did you mean '{meant}'?" in result.output) == (2, True), result.output
    assert "Did you mean" not in invoke("xyzzy").output
