"""Run the core tests against the releases of torch, transformers, accelerate and peft that a user may have.

    make test-versions                               # every row, minutes and some gigabytes each
    make test-versions ARGS="--rows default newest"  # these; the page keeps the results of the others
    make test-versions ARGS="--list"                 # which versions each row stands for today

A row is a virtual environment in build/versions/: its own releases of the four packages, everything else from .venv. It is
deleted when its tests have run (--keep leaves it for the next run). CUDA builds of torch run on a CPU too. Writes build/reports/test-versions.json
and the table of docs/versions.md, which hold the rows that have run; exits with 1 if a row of this run failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tables import with_tables


ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "peft")
TESTS = (
    "tests/unit/test_trainer_internals.py",
    "tests/unit/test_package_versions.py",
    "tests/unit/test_loading.py",
    "tests/unit/test_stage_cut.py",
    "tests/unit/test_tp_check.py",
    "tests/ranks/test_trainer_parity.py",
    "tests/ranks/test_adapters.py",
    "tests/ranks/test_gradient_reducer.py",
    "tests/ranks/test_flat_collectives.py",
    "tests/ranks/test_raw_loop.py::test_all_ranks_skip_a_step_that_overflowed_on_one",
    "tests/ranks/test_zero.py::test_a_checkpoint_resumes_on_other_replicas_and_stages",
)
LIMIT_S = 900.0


@dataclass(frozen=True)
class Row:
    """Releases to test together.

    Args:
        name: For `--rows`.
        torch: A release, or a word as below.
        transformers: "newest"; "newest minor": its first release; "before", "minor before": last and first of the minor before;
            "floor": the first of the range in pyproject.toml.
        accelerate: Likewise.
        peft: Likewise.
    """

    name: str
    torch: str
    transformers: str
    accelerate: str
    peft: str


ROWS = (
    Row("default", "2.13.0", "newest", "newest", "newest"),
    Row("before", "2.13.0", "before", "before", "before"),
    Row("minor-before", "2.13.0", "minor before", "minor before", "minor before"),
    Row("newest-minor", "2.13.0", "newest minor", "newest minor", "newest minor"),
    Row("floor", "2.13.0", "floor", "floor", "minor before"),
    Row("oldest", "2.11.0", "minor before", "minor before", "minor before"),
    Row("oldest-torch", "2.11.0", "newest", "newest", "newest"),
    Row("torch-before", "before", "newest", "newest", "newest"),
    Row("newest", "newest", "newest", "newest", "newest"),
)


@dataclass
class Result:
    """What a row showed; `problem` where its packages could not be installed or its tests did not end."""

    versions: dict[str, str]
    date: str
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Whether all tests passed."""
        return self.passed > 0 and not self.failed and not self.problem


def release(wanted: str, available: Sequence[str], supported: str = "") -> str:
    """The release that a word of a row stands for.

    Raises:
        ValueError: The index offers none.
    """
    final = sorted((v for v in map(Version, available) if not v.is_prerelease and not v.local), reverse=True)
    if wanted == "floor":
        return str(min(version for version in final if version in SpecifierSet(supported)))
    minors = sorted({version.release[:2] for version in final}, reverse=True)
    if wanted not in ("newest", "newest minor", "before", "minor before"):
        if Version(wanted) not in final:
            raise ValueError(f"{wanted} is not among {', '.join(map(str, final[:8]))}")
        return wanted
    if len(minors) < 2:
        raise ValueError(f"there is no minor release before {final[:1]}")
    of_minor = [version for version in final if version.release[:2] == minors["before" in wanted]]
    return str(of_minor[-1] if "minor" in wanted else of_minor[0])


def offered(package: str) -> list[str]:
    """Releases on the package index that pip is set up for, newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^Available versions: (.*)$", text, flags=re.MULTILINE)
    return [] if found is None else found[1].split(", ")


def installed(row: str, versions: dict[str, str]) -> Path:
    """The Python of a new virtual environment with these releases; all else is .venv's.

    Raises:
        subprocess.CalledProcessError: pip found no way.
    """
    folder = ROOT / "build" / "versions" / row
    done, content = folder / "versions.json", json.dumps(versions)
    if done.exists() and done.read_text() == content:  # left by --keep
        return folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "fallback.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    pip += ["--quiet", "--no-cache-dir", "--no-compile"]
    pins = [f"{name}=={version}" for name, version in versions.items() if not is_there(name, version)]
    if pins:
        subprocess.run([*pip, *pins], check=True, capture_output=True, text=True, timeout=1800)
    done.write_text(content)
    return python


def is_there(name: str, version: str) -> bool:
    """Whether .venv has this release, whatever it was built for."""
    from importlib.metadata import version as version_of

    return Version(version_of(name)).public == version


def tested(python: Path, result: Result, tests: Sequence[str]) -> None:
    """Run the tests with a row's Python and note what they showed."""
    report = python.parents[1] / "tests.xml"
    markers = "not slow and not gpu and not deepspeed and not softcuda"
    command = [str(python), *["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m"], markers]
    command += [f"--junitxml={report}", f"--basetemp={python.parents[1] / 'pytest'}", *tests]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    try:
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        result.problem = f"the tests did not end in {LIMIT_S:g} s"
        return
    result.seconds = round(time.monotonic() - start)
    if not report.exists():
        result.problem = last_line(ended.stdout + ended.stderr)
        return
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    result.failed = tuple(f"{case.get('classname')}::{case.get('name')}" for case in bad)
    result.skipped = sum(case.find("skipped") is not None for case in cases)
    result.passed = len(cases) - len(bad) - result.skipped
    if bad:
        sys.stdout.write(ended.stdout[-6000:])


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


def run_row(name: str, versions: dict[str, str], tests: Sequence[str], *, keep: bool) -> Result:
    """Install, test, delete; releases outside of the ranges are refused by the import, and not tested."""
    result = Result(versions, datetime.datetime.now(datetime.UTC).date().isoformat())
    outside = [one.name for one in ranges() if not one.specifier.contains(versions[one.name])]
    if outside:
        result.problem = f"refused: {', '.join(outside)}"
        return result
    try:
        tested(installed(name, versions), result, tests)
    except subprocess.CalledProcessError as error:
        result.problem = f"not installed: {last_line(error.stderr or '')}"
    except subprocess.TimeoutExpired:
        result.problem = "not installed in half an hour"
    if not keep:
        shutil.rmtree(ROOT / "build" / "versions" / name, ignore_errors=True)
    return result


def table(results: Sequence[Result], page: str = "") -> list[str]:
    """A line for each row; where releases cannot be installed here, that of an earlier run on `page`, if there is one."""
    lines = [
        f"| {' | '.join(PACKAGES)} | tests passed | failed | skipped | date |",
        "|:--|:--|:--|:--|--:|--:|--:|:--|",
    ]
    for result in results:
        versions = " | ".join(result.versions[name] for name in PACKAGES)
        failed = result.problem or str(len(result.failed))
        now = f"| {versions} | {result.passed} | {failed} | {result.skipped} | {result.date} |"
        earlier = [line for line in page.splitlines() if line.startswith(f"| {versions} |")]
        lines.append(earlier[0] if earlier and result.problem.startswith("not installed") else now)
    return lines


def ranges() -> list[Requirement]:
    """What pyproject.toml asks for; a release below it is tried by lowering the range there and in compat/versions.py."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [one for one in map(Requirement, lines) if one.name in PACKAGES]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--list", action="store_true", help="print the releases of each row")
    parser.add_argument("--keep", action="store_true", help="leave the virtual environments")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "test-versions.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "versions.md")
    return parser.parse_args()


def main() -> int:
    """Run the rows, write report and page; returns the exit code."""
    given = options()
    available = {name: offered(name) for name in PACKAGES}
    supported = {one.name: str(one.specifier) for one in ranges()}
    wanted = {
        row.name: {name: release(getattr(row, name), available[name], supported.get(name, "")) for name in PACKAGES}
        for row in ROWS
        if row.name in given.rows
    }
    if given.list:
        for name, versions in wanted.items():
            sys.stdout.write(f"{name:<14} {' '.join(f'{package} {versions[package]}' for package in PACKAGES)}\n")
        return 0
    before = json.loads(given.report.read_text())["rows"] if given.report.exists() else {}
    results = {name: Result(**row) for name, row in before.items()}
    for name, versions in wanted.items():
        results[name] = result = run_row(name, versions, given.tests, keep=given.keep)
        said = result.problem or f"{result.passed} passed, {len(result.failed)} failed in {result.seconds:.0f} s"
        sys.stdout.write(f"{name}: {versions}: {said}\n")
        given.report.parent.mkdir(parents=True, exist_ok=True)
        shown = {row.name: asdict(results[row.name]) for row in ROWS if row.name in results}
        given.report.write_text(json.dumps({"tests": list(given.tests), "rows": shown}, indent=1) + "\n")
    ordered = sorted(results.values(), key=lambda one: [Version(one.versions[name]) for name in PACKAGES])
    distinct = {tuple(one.versions.values()): one for one in ordered}
    page = given.page.read_text()
    tables = {
        "versions": table(list(distinct.values()), page),
        "ranges": [f"Supported: {', '.join(f'`{one}`' for one in ranges())}."],
    }
    given.page.write_text(with_tables(page, tables))
    return 0 if all(results[name].holds or results[name].problem.startswith("refused") for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
