"""A pytest plugin: this process and the ranks that tests start have soft CUDA devices. Needs tests/ in PYTHONPATH."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from softcuda.build import BUILD, build


TESTS = Path(__file__).parents[1]
_started = time.perf_counter()
build()
_built = time.perf_counter()
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import rank_runner  # noqa: E402

import softcuda.devices  # noqa: E402, F401


rank_runner.PRELOAD.insert(0, "softcuda.devices")  # before torch


class Report:
    """What each test did, in build/reports/test-softcuda.json."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setting up counts: runs that several tests look at are made there."""
        row = self.rows.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            row["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        import torch

        path = BUILD.parents[0] / "reports" / "test-softcuda.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        summary = {
            "torch": torch.__version__,
            "build_s": round(_built - _started, 1),
            "seconds": round(time.perf_counter() - _built, 1),
            "tests": list(self.rows.values()),
        }
        path.write_text(json.dumps(summary, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report())
