"""A unit imports only from lower floors; units on one floor never import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = Path(__file__).resolve().parents[2] / "hf_parallel"

# Lowest first. A unit is a module or a sub-package of hf_parallel; one that exists must be listed.
FLOORS = [
    {"errors", "sections"},
    {"problems", "replica_sections", "machine", "noticeboard", "one_rank", "settings_file"},
    {"zero_rules"},
    {"config", "compat"},
    {"recipes", "mesh", "watchdog", "accumulation"},
    {"deepspeed", "tensor_parallel", "pipeline_parallel", "data_parallel", "gradient_compression"},
    {"ledger", "batches", "memory", "launch"},
    {"guards"},
    {"replicas", "checkpointing"},
    {"preflight", "gradients", "weights", "adapters"},
    {"engine", "loading"},
    {"pipeline_engine", "planning", "twin"},
    {"plugin"},
    {"session", "model_folder", "replica_view"},
    {"accelerator"},
    {"training"},
    {"raw_loop"},
    {"callback"},
    {"trainer"},
    {"validation"},
    {"export"},
    {"cli"},
]
STRATEGIES = {"tensor_parallel", "pipeline_parallel", "data_parallel", "gradient_compression"}
STRATEGIES_MAY_IMPORT = {"errors", "sections", "replica_sections", "config", "compat", "mesh", "one_rank"}

FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}


def unit_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def sources(package: Path) -> list[Path]:
    return [path for path in sorted(package.rglob("*.py")) if path != package / "__init__.py"]


def imported_units(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and unit of every import of our own, inside functions and `TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                parents = path.parent.relative_to(package.parent).parts
                base = [*parents[: len(parents) - node.level + 1], *(node.module or "").split(".")]
            else:
                base = (node.module or "").split(".")
            names = [".".join([*filter(None, base), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == package.name and rest:
                yield node.lineno, rest[0]


def violations(package: Path) -> list[str]:
    found = []
    for path in sources(package):
        unit = unit_of(path, package)
        for line, other in imported_units(path, package):
            legal = FLOOR_OF.get(other, len(FLOORS)) < FLOOR_OF.get(unit, -1)
            if unit in STRATEGIES and other not in STRATEGIES_MAY_IMPORT:
                legal = False
            if other != unit and not legal:
                found.append(f"{path.relative_to(package.parent)}:{line}: {unit} imports {other}")
    return found


def test_every_unit_stands_on_one_floor() -> None:
    listed = [unit for units in FLOORS for unit in units]
    assert len(listed) == len(set(listed))
    missing = {unit_of(path, PACKAGE) for path in sources(PACKAGE)} - set(listed)
    assert not missing, f"add {sorted(missing)} to FLOORS in {Path(__file__).name}"


def test_units_import_only_from_lower_floors() -> None:
    assert violations(PACKAGE) == []


def test_sub_packages_start_with_a_docstring_only() -> None:
    for path in PACKAGE.glob("*/__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        kinds = [node for node in body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
        assert len(kinds) == 1, path
        assert isinstance(kinds[0], ast.Expr), path


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("config.py", "from hf_parallel.recipes import KEY"),
        ("config.py", "from hf_parallel import recipes"),
        ("config.py", "def f():\n    import hf_parallel.recipes"),
        ("mesh.py", "from hf_parallel.recipes import KEY"),
        ("tensor_parallel/plan.py", "from hf_parallel.pipeline_parallel.actions import Action"),
        ("tensor_parallel/plan.py", "from ..pipeline_parallel import actions"),
        ("tensor_parallel/plan.py", "from hf_parallel.recipes import KEY"),
        ("errors.py", "from .config import x"),
        ("unlisted.py", "from hf_parallel import errors"),
    ],
)
def test_a_planted_import_is_found(file: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "hf_parallel" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert len(violations(tmp_path / "hf_parallel")) == 1
