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
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from settings_answers import HEAD, LONGEST, NINES, answering

from hf_parallel.dry_run.check_file import check_file
from hf_parallel.errors import ParallelError
from hf_parallel.machine.facts import Machine
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import resolve_config
from hf_parallel.settings.recipes import list_recipes, load_recipe, recipes_folder


MACHINE = Machine((), 8 * 2**30)
SEED = int(os.environ.get("HF_PARALLEL_FUZZ_SEED", "0")) or int(time.time())

OURS = HEAD + "parallelism_config:\n  hf_parallel:\n"
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


# -- every value at every key ------------------------------------------------------------------------------------------

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
