"""What the scripts over the zoo share: two worker processes, their options, the versions, the report."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
WORKERS = 2

Job = TypeVar("Job")
Row = TypeVar("Row")


def options(description: str, report: str, seconds: int) -> argparse.ArgumentParser:
    """The options that all have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--timeout", type=int, default=seconds, help="seconds an entry may take")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / report)
    return parser


def _one_thread() -> None:
    torch.set_num_threads(1)


def in_workers(sweep: Callable[[Job], Row], jobs: Sequence[Job]) -> Iterator[Row]:
    """Rows in the order of `jobs`; each process works on one entry at a time."""
    with multiprocessing.get_context("spawn").Pool(WORKERS, _one_thread) as pool:
        yield from pool.imap(sweep, jobs)


def versions() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"


def write_report(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows), indent=1) + "\n")
