"""Whatever stands in a settings file, the answer is a config or one short error that names the file, soon.

The mutations come from the shipped recipes. A seed that fails is printed with its text; `HF_PARALLEL_FUZZ_SEED` chooses the
first one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.dry_run.check_file import check_file
from hf_parallel.errors import ConfigError, ParallelError
from hf_parallel.machine.facts import Machine
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import resolve_config
from hf_parallel.settings.recipes import list_recipes, load_recipe, recipes_folder


MACHINE = Machine((), 8 * 2**30)
LONGEST = 6000  # characters of a message: dozens of problems, each with its fix
TOO_LONG_S = 20  # an answer takes milliseconds; what has no bound takes minutes, on any machine
SEED = int(os.environ.get("HF_PARALLEL_FUZZ_SEED", "0")) or int(time.time())

HEAD = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
OURS = HEAD + "parallelism_config:\n  hf_parallel:\n"
NINES = "9" * 5000
VALUES = [
    *(
        "1e999",
        "-1e999",
        ".inf",
        "-.inf",
        ".nan",
        "-1",
        "0",
        "true",
        "null",
        "''",
        "[]",
        "{}",
        "[[]]",
        "hello",
        "0x" + "f" * 5000,
    ),
    *(
        NINES,
        f"'{NINES}'",
        f"-{NINES}",
        "1000000000000",
        "9223372036854775808",
        "1.5",
        "'1.5e3'",
        "1:30:00",
        "'\u0663'",
        "0b1",
    ),
    *("2001-99-99", "2001-01-01", "2001-01-01 25:61:61", "!!python/object/apply:os.system [ls]", "!!python/tuple [1]"),
    *(
        "!!int hello",
        "!!int ''",
        "!!float x",
        "!!bool hello",
        "!!timestamp hello",
        "!!binary '\u00e9'",
        "!!set {a, b}",
    ),
    *(
        "!!omap [a: 1, a: 2]",
        "!!pairs [a: 1]",
        "!!null x",
        "!foo bar",
        "&a [*a]",
        "&a {b: *a}",
        "*nowhere",
        "<<",
        "@x",
        "`x",
    ),
    *(
        "!!merge x",
        "!!str [1]",
        "!!map [1]",
        "!!seq {a: 1}",
        "{1: 2}",
        "{[1]: 2}",
        "{null: 1}",
        "/dev/zero",
        "x" * 20000,
    ),
    *(
        "[" * 3000,
        "{a: " * 3000,
        "- " * 3000,
        "? " * 500,
        "'",
        '"',
        "|",
        "%",
        "---",
        "...",
        "\t",
        "{<<: 1}",
        "{<<: [1]}",
    ),
    *(
        "{? : 1}",
        "[,]",
        "{a: 1, a: 2}",
        "{<<: {a: 1}, <<: {b: 2}}",
        "4_0",
        "+5",
        "5e8",
        "0o17",
        "~",
        "on",
        "'no'",
        "=",
        "/",
    ),
]


@contextlib.contextmanager
def answering(seed: object, text: str) -> Iterator[None]:
    """Fail with the seed and the text if what is inside raises anything but our errors, or does not end."""

    def too_long(*args: Any) -> None:
        raise TimeoutError(f"no answer within {TOO_LONG_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(TOO_LONG_S)
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {str(error)[:500]}\n---\n{text[:3000]}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutated(random_: random.Random, texts: list[str]) -> bytes:
    """One of the texts with one to three things wrong."""
    content = random_.choice(texts).encode()
    for _ in range(random_.randint(1, 3)):
        content = random_.choice(MUTATIONS)(random_, content)
    return content


def flip_bytes(random_: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random_.randint(1, 4)):
        changed[random_.randrange(len(changed))] = (
            random_.randrange(256) if random_.random() < 0.5 else random_.choice(b"[]{}&*!|>'\"%@`:,-#\t\n ?")
        )
    return bytes(changed)


def replace_value(random_: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    places = [i for i, line in enumerate(lines) if b":" in line and not line.startswith(b"#")]
    if places:
        i = random_.choice(places)
        lines[i] = lines[i].split(b":")[0] + b": " + random_.choice(VALUES).encode()
    return b"\n".join(lines)


def replace_in_braces(random_: random.Random, content: bytes) -> bytes:
    found = list(re.finditer(rb": ([^,{}\n]+)[,}]", content))
    if not found:
        return replace_value(random_, content)
    start, end = random_.choice(found).span(1)
    return content[:start] + random_.choice(VALUES).encode() + content[end:]


def swap_tokens(random_: random.Random, content: bytes) -> bytes:
    tokens = re.split(rb"(\W+)", content)
    i, j = random_.randrange(len(tokens)), random_.randrange(len(tokens))
    tokens[i], tokens[j] = tokens[j], tokens[i]
    return b"".join(tokens)


def edit_lines(random_: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    i = random_.randrange(len(lines))
    act = random_.randrange(5)
    if act == 0:
        del lines[i]
    elif act == 1:
        lines.insert(random_.randrange(len(lines) + 1), lines[i])
    elif act == 2:
        lines[i] = b"  " * random_.randint(1, 4) + lines[i]
    elif act == 3:
        lines[i] = lines[i].lstrip()
    else:
        lines[i] = (
            random_.choice(
                [
                    b"fsdp_config",
                    b"deepspeed_config",
                    b"parallelism_config",
                    b"num_processes",
                    b"<<",
                    b"tp_size",
                    b"hf_parallel",
                ]
            )
            + b": "
            + random_.choice(VALUES).encode()
        )
    return b"\n".join(lines) or b"x"


def multiply(random_: random.Random, content: bytes) -> bytes:
    """Aliases of aliases, deep nesting, or a long list."""
    depth = random_.randint(2, 40)
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, depth))
    merges = "m0: &m0 {k0: 1}\n" + "".join(
        f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}], k{i}: 1}}\n" for i in range(1, depth)
    )
    deep = "".join(f"{' ' * i}d:\n" for i in range(random_.randint(10, 400)))
    many = "".join(f"key{i}: {i}\n" for i in range(random_.randint(100, 4000)))
    return content + b"\n" + random_.choice([bomb, merges, deep, many]).encode()


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    flip_bytes,
    replace_value,
    replace_value,
    replace_in_braces,
    swap_tokens,
    edit_lines,
    multiply,
]


def sources() -> list[str]:
    texts = [(recipes_folder() / f"{name}.yaml").read_text() for name in list_recipes()]
    full = HFParallelConfig(pp_size=2, tp_size=2).model_dump(mode="json")
    whole = yaml.safe_load(HEAD) | {"num_processes": 4, "parallelism_config": {"hf_parallel": full}}
    return [*texts, yaml.safe_dump(whole, sort_keys=False)]


def judge(path: Path, seed: object, content: bytes) -> str:
    """Try every reader of a file on one text; what the loader said, empty for a config."""
    path.write_bytes(content)
    text = content.decode(errors="replace")
    with answering(seed, text):
        try:
            load_recipe(path)
            said = ""
        except ParallelError as error:
            said = str(error)
            assert str(path) in said, said
            assert len(said) <= LONGEST + len(str(path)) * 50, len(said)
        checked = check_file(path, MACHINE)
        assert all(len(str(finding)) <= LONGEST for finding in checked.findings)
        assert not said or checked.errors or "it has no parallelism_config.hf_parallel section" in said, said
        if checked.config is not None:
            json.dumps(checked.config.to_yaml_section())
            checked.config.fingerprint()
        with contextlib.suppress(ParallelError):
            resolve_config(path)
    return said


def fuzz(path: Path, cases: int, first: int) -> None:
    texts = sources()
    refused = 0
    for seed in range(first, first + cases):
        refused += bool(judge(path, seed, mutated(random.Random(seed), texts)))
    print(f"seeds {first} to {first + cases - 1}: {refused} refused")
    assert refused > cases // 4  # they do break something


def test_a_hundred_mutations_of_the_recipes_are_configs_or_errors(tmp_path: Path) -> None:
    fuzz(tmp_path / "mine.yaml", 100, SEED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_mutations_of_the_recipes_are_configs_or_errors(tmp_path: Path) -> None:
    fuzz(tmp_path / "mine.yaml", 2000, SEED + 1_000_000)


# -- the known ones ----------------------------------------------------------------------------------------------------

KEYS = [
    *(
        "tp_size",
        "pp_size",
        "gradient_accumulation_steps",
        "pipeline",
        "tensor_parallel",
        "zero",
        "monitor",
    ),
    *("{pp_size: 2, pipeline: {num_microbatches", "{pp_size: 2, pipeline: {schedule", "{pp_size: 2, pipeline: {split"),
    *(
        "{pp_size: 2, pipeline: {schedule: csv, schedule_file",
        "{tp_size: 2, tensor_parallel: {plan",
        "{monitor: {hang_timeout_s",
    ),
    *(
        "{data_parallel: {bucket_cap_mb",
        "{zero: {stage",
        "{local_sgd: {sync_every: 2, outer_lr",
        "{pp_size: 2, pipeline: {stages_per_rank",
    ),
    *(
        "{gradient_compression: {method: topk, density",
        "{gradient_compression: {method: int8, link_gbit_s",
        "{tp_size",
    ),
]


SOME_OR_ALL = pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])


@SOME_OR_ALL
@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_a_setting_raises_anything_else(key: str, step: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for value in VALUES[KEYS.index(key) % step :: step]:
        if key.startswith("{"):
            line = f"    {key}: {value}{'}' * key.count('{')}"
            text = HEAD + "parallelism_config:\n  hf_parallel:\n" + line + "\n"
        else:
            text = OURS + f"    {key}: {value}\n"
        judge(path, f"{key}: {value[:60]}", text.encode())


TOP = ["fsdp_config", "deepspeed_config", "parallelism_config", "megatron_lm_config", "num_processes", "num_machines"]
TOP += ["distributed_type", "mixed_precision", "use_cpu", "machine_rank", "deepspeed_config: {deepspeed_config_file"]


@pytest.mark.parametrize("key", TOP)
@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "DEEPSPEED"])
@SOME_OR_ALL
def test_no_value_around_our_section_raises_anything_else(key: str, kind: str, step: int, tmp_path: Path) -> None:
    path, head = tmp_path / "mine.yaml", HEAD.replace("MULTI_GPU", kind)
    section = "parallelism_config: {hf_parallel: {}}\n" if key != "parallelism_config" else ""
    for value in VALUES[TOP.index(key) % step :: step]:
        line = f"{key}: {value}{'}' * key.count('{')}\n"
        text = "".join(row + "\n" for row in head.splitlines() if not row.startswith(f"{key}:")) + line + section
        judge(path, f"{key}: {value[:60]}", text.encode())


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
