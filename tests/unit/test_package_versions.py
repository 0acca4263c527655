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
sys.path.insert(0, str(ROOT / "benchmarks"))

from versions import PACKAGES, Result, release, table  # noqa: E402


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


def test_words_of_a_row_stand_for_releases() -> None:
    available = ["5.23.1", "5.24.0rc1", "5.23.0", "5.22.2", "5.22.0", "5.9.0", "5.22.1+cpu"]
    words = ("newest", "newest minor", "before", "minor before", "5.9.0")
    assert [release(word, available) for word in words] == ["5.23.1", "5.23.0", "5.22.2", "5.22.0", "5.9.0"]
    assert release("floor", available, ">=5.22,<5.24") == "5.22.0"
    with pytest.raises(ValueError, match=r"5\.8\.0 is not among 5\.23\.1, 5\.23\.0"):
        release("5.8.0", available)


def test_the_table_says_what_ran_and_what_could_not() -> None:
    versions = dict.fromkeys(PACKAGES, "1.0")
    good = Result(versions, "2026-11-22", passed=9, skipped=1)
    bad, absent = (
        Result(versions, "2026-11-22", 8, 1, ("a::b",)),
        Result(versions, "2026-11-22", problem="not installed: x"),
    )
    assert [one.holds for one in (good, bad, absent)] == [True, False, False]
    rows = [line.split(" | ")[4:] for line in table([good, bad, absent])[2:]]
    assert rows == [
        ["9", "0", "1", "2026-11-22 |"],
        ["8", "1", "1", "2026-11-22 |"],
        ["0", "not installed: x", "0", "2026-11-22 |"],
    ]


def test_what_cannot_be_installed_here_keeps_the_line_of_an_earlier_run() -> None:
    versions = dict.fromkeys(PACKAGES, "1.0")
    earlier = table([Result(versions, "2026-11-22", passed=9)])
    absent, refused = (Result(versions, "2026-11-30", problem=text) for text in ("not installed: x", "refused: torch"))
    assert table([absent], "\n".join(earlier)) == earlier
    assert table([refused], "\n".join(earlier)) != earlier
