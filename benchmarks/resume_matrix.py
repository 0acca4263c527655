"""Save under every layout, resume under every other: `python benchmarks/resume_matrix.py`.

A tiny Llama with tied embeddings, three heads and one key-value head trains eight steps under each layout and is saved
after the third, in the middle of an epoch. Each checkpoint is resumed under each layout, from other weights. The five
losses that follow must equal those of the run that was not interrupted to `TOLERANCE`, and weights and optimizer state must
be the saved ones bit by bit before the first step; under the layout that saved, the losses must be equal bit by bit too.

Writes build/reports/resume-matrix.json; exits with 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from resume_cases import LAYOUTS, SAVED_AT, Job, run_jobs, states_equal  # noqa: E402


TOLERANCE = 1e-5


def run_matrix(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """One row a cell: what saved, what resumed, the largest difference, and whether the state is the saved one."""
    sources = [Job(name, str(folder / f"saved-{name}")) for name in names]
    straight = dict(zip(names, run_jobs(sources, folder), strict=True))
    cells = [(saved, resumed) for saved in names for resumed in names]
    checkpoint = f"checkpoint-{SAVED_AT}"
    jobs = [
        Job(resumed, str(folder / f"{saved}-to-{resumed}"), str(folder / f"saved-{saved}" / checkpoint))
        for saved, resumed in cells
    ]
    rows = []
    for (saved, resumed), job, losses in zip(cells, jobs, run_jobs(jobs, folder), strict=True):
        expected = straight[saved][SAVED_AT:]
        moved = states_equal(Path(str(job.resume)), Path(job.folder) / "again")
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        limit = 0.0 if saved == resumed else TOLERANCE
        rows.append(
            {
                "saved": saved,
                "resumed": resumed,
                "difference": difference,
                "state_is_equal": moved,
                "passed": moved and difference <= limit,
            }
        )
    return rows


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """The cells as text: largest difference of a loss, `!` where a cell fails."""
    cell = {(row["saved"], row["resumed"]): row for row in rows}
    lines = ["saved \\ resumed".ljust(16) + "".join(name.rjust(10) for name in names)]
    for saved in names:
        shown = (cell[saved, resumed] for resumed in names)
        text = (f"{row['difference']:.0e}{'' if row['passed'] else '!'}".rjust(10) for row in shown)
        lines.append(saved.ljust(16) + "".join(text))
    return "\n".join(lines)


def main() -> int:
    """Run the matrix, print it, write the report; returns the exit code."""
    parser = argparse.ArgumentParser(description="Save under every layout and resume under every other.")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "resume-matrix.json")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_matrix(arguments.layouts, Path(folder))
    print(table(rows, arguments.layouts))
    failed = [row for row in rows if not row["passed"]]
    seconds = round(time.perf_counter() - start, 1)
    print(f"{len(rows) - len(failed)} of {len(rows)} cells pass, {seconds} s")
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps({"tolerance": TOLERANCE, "seconds": seconds, "cells": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
