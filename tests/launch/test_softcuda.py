"""A training on CUDA tensors in host memory: what `make test-softcuda` does at length, so that no change forgets CUDA devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


TESTS = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="soft CUDA devices are compiled with g++")
def test_stages_and_shared_optimizers_train_on_soft_cuda_devices() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "softcuda.plugin",
        "-p",
        "no:cacheprovider",
        "-m",
        "softcuda",
    ]
    command += ["tests/softcuda/test_training.py", "-k", "pp2_evaluated or zero1_offloaded"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=env | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, check=False
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
