"""What every run of the tests says at its end: which files its seconds went to."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LONGEST


SLOW = """
import time, pytest

@pytest.fixture(scope="module")
def trained():
    time.sleep(0.3)
    yield
    time.sleep(0.2)

def test_one(trained):
    time.sleep(0.4)

def test_two(trained):
    assert False
"""
QUICK = "def test_quick(): ..."


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]], ids=["one_process", "two_workers"])
def test_seconds_of_each_file_are_printed_with_fixtures_and_failures(options: list[str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "test_quick.py").write_text(QUICK)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *options]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
    last = output.splitlines()[-1]
    assert "1 failed, 2 passed" in last, output
    title, first, second = re.findall(r".*worker-seconds.*|^ *[\d.]+ s .*", output, re.MULTILINE)
    assert "of 3 tests" in title
    seconds, name, count = re.fullmatch(r" *([\d.]+) s  (\S+) \((\d+)\)", first).groups()
    assert (name, count) == ("test_slow.py", "2")
    assert float(seconds) >= 0.9, "sleeps of the fixture, before and after, and of the test"
    assert second.endswith("test_quick.py (1)")


def test_files_that_begin_first_exist() -> None:
    assert set(LONGEST) <= {path.name for path in Path(__file__).parent.rglob("test_*.py")}
