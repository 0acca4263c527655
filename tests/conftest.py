"""Fixtures that keep tests apart: no leaked launcher variables, no network, a private working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_PARALLEL_CACHE"] = ""  # what one test finds out about a model is not for another
sys.path.insert(0, str(Path(__file__).parent))

LAUNCHER_PREFIXES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "HF_PARALLEL_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Files whose tests take minutes: with two processes, one that begins last would run alone at the end.
LONGEST = (
    "test_benchmarks.py",
    "test_schedule_parity.py",
    "test_trainer_features.py",
    "test_trainer_parity.py",
    "test_tp_trainer_parity.py",
    "test_fsdp.py",
    "test_own_losses.py",
    "test_compression_trainer.py",
    "test_scaled_down_recipes.py",
    "test_launch_failures.py",
    "test_settings_fuzz.py",
    "test_resume.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_PARALLEL_CACHE", "")
    monkeypatch.chdir(tmp_path)
