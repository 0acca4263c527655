"""Settings, files and commands of which one once ended in anything but a short error that names them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from settings_answers import HEAD, LONGEST, NINES, answering
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.errors import ConfigError, ParallelError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import resolve_config
from hf_parallel.settings.recipes import load_recipe


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fsdp_config: hello", r"fsdp_config='hello': expected a mapping"),
        ("deepspeed_config: [1]", r"deepspeed_config=\[1\]: expected a mapping"),
        ("parallelism_config: hello", r"parallelism_config='hello': expected a mapping"),
        ("fsdp_config: {1: 2}", r"fsdp_config\[1\]: keys are strings"),
        ("1: 2", r"1: keys are strings"),
    ],
)
def test_a_section_that_is_no_mapping_is_refused_by_name(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    ours = "" if line.startswith("parallelism") else "parallelism_config: {hf_parallel: {}}\n"
    path.write_text(HEAD + ours + line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)
    assert re.search(message, CliRunner().invoke(app, ["validate", str(path)]).output.replace("\n", " "))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2001-99-99\n", 2, "2001-99-99"),
        ("a: 1\n\nb: !!timestamp hello\n", 3, "cannot be read"),
        (f"a: {NINES}\n", 1, "cannot be read"),
        ("a: 1\nb: !!bool hello\n", 2, "KeyError"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "constructor"),
        ("x:\n  tp_size: 1\n  tp_size: 2\n", 3, "'tp_size' is written twice, first in line 2"),
        ("a: &a [*a]\n", 1, "contains itself"),
        ("a: 1\nb: \x07\n", 2, "0x0007"),
        ("a: 1\nb: " + "[" * 5000, 2, "nested too deeply"),
        (
            "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20))]),
            4,
            "aliases",
        ),
    ],
)
def test_what_yaml_raises_is_an_error_with_its_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:{line}: not valid YAML")
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: "])
def test_nesting_is_refused_before_it_is_read(opening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanner: Any = yaml.scanner.Scanner
    fetch, found = scanner.fetch_more_tokens, []

    def counted(self: Any) -> None:
        found.append(self.line)
        fetch(self)

    monkeypatch.setattr(scanner, "fetch_more_tokens", counted)
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1\nb:\n  " + opening * 3000)
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: not valid YAML: nested too deeply"):
        load_recipe(path)
    assert len(found) < 300  # more for a single bracket would be the square of a kilobyte of them


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:2: not valid YAML: the byte 0xff is not UTF-8"):
        load_recipe(path)


def odd_files(folder: Path) -> dict[str, Path]:
    pipe, big = folder / "pipe", folder / "big"
    os.mkfifo(pipe)
    with big.open("wb") as file:
        file.truncate(2**31)
    loop = folder / "loop"
    loop.symlink_to(loop)
    files = {
        "device": Path("/dev/zero"),
        "pipe": pipe,
        "folder": folder,
        "huge": big,
        "none": folder / "none",
        "loop": loop,
    }
    return files | {
        "long": Path("x" * 5000),
        "null": Path("a\0b"),
        "nobody's": Path("~nobody-here/x"),
        "memory": Path("/proc/self/mem"),
    }


def test_files_that_are_none_end_in_a_short_error_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: dict[str, Callable[[Path], object]] = {
        "recipe": load_recipe,
        "argument": resolve_config,
        "schedule file": lambda path: _with_schedule(str(path)),
        "environment": lambda path: _from_environment(monkeypatch, str(path)),
    }
    for name, path in odd_files(tmp_path).items():
        for way, read in ways.items():
            if way == "environment" and name == "null":
                continue  # no variable can hold it
            with answering(f"{way} {name}", ""), pytest.raises(ParallelError) as caught:
                read(path)
            assert len(str(caught.value)) < LONGEST, (way, name)


def _with_schedule(path: str) -> None:
    from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice

    config = HFParallelConfig(pp_size=2, pipeline={"schedule": "csv", "schedule_file": path})
    ScheduleChoice(config.pipeline, config.pp_size)


def _from_environment(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HF_PARALLEL_CONFIG", path)
    resolve_config()


COMMANDS = [
    ["validate", "{}"],
    ["validate", "{}", "--json"],
    ["validate", "cpu_pp2", "--model", "{}"],
    ["export", "{}", "--to", "deepspeed"],
    ["prebuild", "{}"],
    ["recipes", "{}"],
    ["schedule", "--file", "{}"],
    ["merge", "{}", "{}-out"],
]


def test_no_command_ends_in_a_traceback(tmp_path: Path) -> None:
    odd = {name: str(path) for name, path in odd_files(tmp_path).items()}
    for text in (
        HEAD + "parallelism_config: hello",
        "a: &a [*a]",
        f"a: {NINES}",
        "[1]",
        "",
        '{"model_type": 3}',
        "[" * 5000,
    ):
        file = tmp_path / f"text{len(odd)}"
        file.write_text(text)
        odd[text[:30]] = str(file)
    for layers in ("1000000000", '"x"', "-1", "1e3"):
        file = tmp_path / f"layers{len(odd)}"
        file.write_text(f'{{"model_type": "llama", "num_hidden_layers": {layers}, "hidden_size": 64}}')
        odd[f"layers {layers}"] = str(file)
    commands = [[part.replace("{}", path) for part in command] for command in COMMANDS for path in odd.values()]
    commands += [["schedule", "--pp", "1000000", "--microbatches", "1000000"], ["schedule", "--pp", "-1"]]
    for command in commands:
        with answering(command, ""):
            result = CliRunner().invoke(app, command)
            assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
            codes = (0, 1, 2) if command[0] == "recipes" else (1, 2)  # that one says where a file is, and reads none
            assert result.exit_code in codes, result.output
            assert len(result.output) < 20_000


@pytest.mark.parametrize(
    "values",
    [
        {"tp_size": 10**12},
        {"tp_size": True},
        {"pp_size": -1},
        {"pp_size": 10**12, "pipeline": {"num_microbatches": 10**12}},
        {"pp_size": 2, "pipeline": {"num_microbatches": 10**5000}},
        {"pp_size": 2, "pipeline": {"num_microbatches": "9" * 5000}},
        {"pp_size": 2**16, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2**16}},
        {"pipeline": "hello"},
        {"pipeline": {1: 2}},
        {1: 2},
        {"tensor_parallel": {"plan": {"x" * 10**6: "pair"}}},
        {"tp_size": 2, "tensor_parallel": {"plan": {"a": 10**5000}}},
        {"x" * 10**6: 1},
        {f"key{i}": i for i in range(20_000)},
        {"pp_size": 2, "pipeline": {"split": [[]] * 10**5}},
        {"monitor": {"hang_timeout_s": float("nan")}},
        {"monitor": {"hang_timeout_s": "1e999x"}},
        {"data_parallel": {"bucket_cap_mb": "1e999"}},
        {"data_parallel": {"bucket_cap_mb": float("inf")}},
    ],
    ids=lambda values: f"{str(next(iter(values)))[:20]}-{len(values)}",
)
def test_mappings_from_code_end_in_a_short_error(values: dict[Any, Any]) -> None:
    for read in (HFParallelConfig.from_mapping, resolve_config):
        with answering("mapping", ""), pytest.raises(ConfigError) as caught:
            read(values)
        assert len(str(caught.value)) < LONGEST


def test_a_mapping_inside_itself_ends_in_a_short_error() -> None:
    values: dict[str, Any] = {"tp_size": 2}
    values["pipeline"] = values
    for given in (values, {"tensor_parallel": {"plan": values}}, {"pipeline": {"split": [values]}}):
        with answering("itself", ""), pytest.raises(ConfigError):
            HFParallelConfig.from_mapping(given)
    with pytest.raises(ConfigError, match=r"pipeline='hello' beside the override num_microbatches"):
        resolve_config({"pipeline": "hello"}, num_microbatches=4)
    with pytest.raises(ConfigError, match=r"config=42: expected a file"):
        resolve_config(42)  # type: ignore[arg-type]
