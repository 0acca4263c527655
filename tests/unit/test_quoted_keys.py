"""A message that names a setting names one that exists: what a user copies from an error must be a key of the schema."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.problems import sections_of


ROOT = Path(__file__).resolve().parents[2]
SECTIONS = "|".join(sections_of(HFParallelConfig))
QUOTED = re.compile(rf"(?<![\w./])(?:{SECTIONS})(?:\.[a-z_][a-z_0-9]*)+")


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string but docstrings; of an f-string its constant parts."""
    tree = ast.parse(source)
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments:
            yield node.lineno, node.value


def exists(path: str) -> bool:
    section: type | None = HFParallelConfig
    for part in path.split("."):
        if section is None or part not in section.model_fields:
            return False
        section = sections_of(section).get(part)
    return True


def unknown_keys(source: str) -> list[str]:
    return [f"{line}: {m[0]}" for line, text in literals(source) for m in QUOTED.finditer(text) if not exists(m[0])]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = f'{y}: set tensor_parallel.overrides.'", ["1: tensor_parallel.overrides"]),
        ("x = 'set local_sgd.compression.methods to int8'", ["1: local_sgd.compression.methods"]),
        ("x = 'set zero.stage, local_sgd.compression.method or activation_checkpointing.every.'", []),
        ('def f():\n    "See data_parallel.wire."', []),
    ],
)
def test_a_planted_key_is_found(source: str, found: list[str]) -> None:
    assert unknown_keys(source) == found


def test_every_key_in_a_message_is_one_of_the_schema() -> None:
    package = ROOT / "hf_parallel"
    modules = [path for path in sorted(package.rglob("*.py")) if path != package / "__init__.py"]  # names of modules
    found = {str(path.relative_to(ROOT)): unknown_keys(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: keys for path, keys in found.items() if keys} == {}
