"""A release of another package that is too old is refused by name when hf_parallel is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_parallel import UnsupportedError
from hf_parallel.compat.versions import SUPPORTED, refuse_old_packages, wanted


ROOT = Path(__file__).resolve().parents[2]
FLOORS = {name: next(iter(SpecifierSet(text.partition(",")[0]))).version for name, text in SUPPORTED.items()}


def test_the_ranges_are_those_of_the_package() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = {one.name: one.specifier for one in map(Requirement, lines)}
    for name in ("torch", "transformers", "accelerate"):
        assert named[name] == Requirement(wanted(name)).specifier


def test_a_version_below_its_floor_is_named() -> None:
    refuse_old_packages()
    refuse_old_packages(lambda name: {"torch": "10.0.0+cu130"}.get(name, f"{FLOORS[name]}.0rc1"))
    found = {"torch": "2.2.0", "transformers": "5.9.1", "accelerate": FLOORS["accelerate"]}
    with pytest.raises(UnsupportedError) as caught:
        refuse_old_packages(found.__getitem__)
    assert str(caught.value).splitlines() == [
        f"hf_parallel needs torch >= {FLOORS['torch']}, found 2.2.0: pip install '{wanted('torch')}'.",
        f"hf_parallel needs transformers >= {FLOORS['transformers']}, found 5.9.1: pip install '{wanted('transformers')}'.",
    ]


def test_a_package_that_is_not_installed_is_left_to_its_import() -> None:
    def version_of(name: str) -> str:
        raise PackageNotFoundError(name)

    refuse_old_packages(version_of)


def test_the_import_refuses(tmp_path: Path) -> None:
    old = tmp_path / "transformers-4.57.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = subprocess.run(
        [sys.executable, "-c", "import hf_parallel"], capture_output=True, text=True, env=env, timeout=60
    )
    assert ended.returncode == 1
    assert f"hf_parallel needs transformers >= {FLOORS['transformers']}, found 4.57.0: pip install" in ended.stderr
