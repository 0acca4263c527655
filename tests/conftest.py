"""Fixtures that keep tests apart: no leaked launcher variables, no network, a private working directory."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONUNBUFFERED", None)  # ranks that share a stdout would write their lines in pieces, mixed
os.environ["HF_PARALLEL_CACHE"] = ""  # what one test finds out about a model is not for another
sys.path.insert(0, str(Path(__file__).parent))

LAUNCHER_PREFIXES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "HF_PARALLEL_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Files whose tests take minutes: with two processes, one that begins last would run alone at the end.
LONGEST = (
    "test_launch_failures.py",
    "test_asynchronous.py",
    "test_trl.py",
    "test_ulysses.py",
    "test_compiled_blocks.py",
    "test_schedule_parity.py",
    "test_verify.py",
    "test_ring_attention.py",
    "test_lora_pipeline.py",
    "test_lora_shards.py",
    "test_planner_memory.py",
    "test_second_models.py",
    "test_backward_code.py",
    "test_trainer_features.py",
    "test_resume_changes.py",
    "test_monitor.py",
    "test_tp_dropout.py",
    "test_own_methods.py",
    "test_vocab_parallel.py",
    "test_softcuda.py",
    "test_fsdp.py",
    "test_benchmarks.py",
    "test_trainer_parity.py",
    "test_tp_trainer_parity.py",
    "test_own_losses.py",
    "test_compression_trainer.py",
    "test_scaled_down_recipes.py",
    "test_resume.py",
    "test_attacks_zero.py",
    "test_freezing_alike.py",
    "test_dry_run.py",
    "test_drift.py",
    "test_tensor_parallel.py",
    "test_settings_fuzz.py",
    "test_settings_known.py",
    "test_tp_pairs.py",
    "test_stage_recompute.py",
    "test_tp_plan.py",
    "test_tp_vocab.py",
    "test_stage_cut.py",
    "test_recipes.py",
    "test_zoo.py",
    "test_planner_cli.py",
    "test_calibrate.py",
    "test_planner_properties.py",
)
SLOWEST_FILES = 25


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """As in `preloaded`, for tests that train in this process."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which files the time went to: seconds of the workers, with fixtures and whatever the outcome."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            tests[file].add(report.nodeid)
    if not seconds:
        return
    count = sum(map(len, tests.values()))
    terminalreporter.section(f"{sum(seconds.values()):.0f} worker-seconds of {count} tests, the slowest files")
    for file in sorted(seconds, key=lambda name: -seconds[name])[:SLOWEST_FILES]:
        terminalreporter.write_line(f"{seconds[file]:8.1f} s  {file} ({len(tests[file])})")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_PARALLEL_CACHE", "")
    monkeypatch.chdir(tmp_path)
