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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from resume_cases import LAYOUTS, SAVED_AT, Job, run_jobs, states_equal  # noqa: E402


TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cell:
    """A checkpoint, and the layout it is resumed under.

    Args:
        saved: Layout that saves.
        resumed: Layout that resumes.
        model: Name in `tiny.MODELS`.
        exact: Whether only data moves, so that losses must be equal bit by bit.
    """

    saved: str
    resumed: str
    model: str = "uneven"
    exact: bool = False

    def job(self, folder: Path) -> Job:
        """The run that resumes."""
        source = folder / f"saved-{self.saved}-{self.model}" / f"checkpoint-{SAVED_AT}"
        name = f"{self.saved}-to-{self.resumed}-{self.model}"
        return Job(self.resumed, str(folder / name), str(source), model=self.model)


# Schedules and stages of which a rank has several, fp32 copies of bf16 parameters, dropout under the layout that saved.
FURTHER = (
    Cell("pp2", "zbv", "llama_tied"),
    Cell("zbv", "gpipe", "llama_tied"),
    Cell("zbv", "1", "llama_tied"),
    Cell("zero1", "fsdp2", "llama_half"),
    Cell("fsdp2", "zero1", "llama_half"),
    Cell("dp2", "dp2", "uneven_dropout", exact=True),
    Cell("pp2", "pp2", "uneven_dropout", exact=True),
    Cell("tp2", "tp2", "uneven_dropout", exact=True),
    *(
        Cell(saved, resumed, "deepseek_v3", exact=saved == resumed)
        for saved in ("1", "ep2", "dp4xep2xzero1", "pp2xep2")
        for resumed in ("1", "ep2", "ep2xzero1", "dp4xep2xzero1", "pp2xep2", "pp2xdp2", "tp2", "zero1")
    ),
)


def run_cells(cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    """One row a cell: the largest difference of a loss, and whether weights and state are the saved ones."""
    sources = list(dict.fromkeys((cell.saved, cell.model) for cell in cells))
    saves = [Job(saved, str(folder / f"saved-{saved}-{model}"), model=model) for saved, model in sources]
    straight = dict(zip(sources, run_jobs(saves, folder), strict=True))
    jobs = [cell.job(folder) for cell in cells]
    rows = []
    for cell, job, losses in zip(cells, jobs, run_jobs(jobs, folder), strict=True):
        expected = straight[cell.saved, cell.model][SAVED_AT:]
        moved = states_equal(Path(str(job.resume)), Path(job.folder) / "again")
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        passed = moved and difference <= (0.0 if cell.exact else TOLERANCE)
        rows.append({**asdict(cell), "difference": difference, "state_is_equal": moved, "passed": passed})
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
    names = arguments.layouts
    matrix = [Cell(saved, resumed, exact=saved == resumed) for saved in names for resumed in names]
    further = list(FURTHER) if len(names) == len(LAYOUTS) else []
    with tempfile.TemporaryDirectory() as folder:
        rows = run_cells([*matrix, *further], Path(folder))
    print(table(rows[: len(matrix)], names))
    for row in rows[len(matrix) :]:
        verdict = "passes" if row["passed"] else "FAILS"
        print(f"{row['model']}: {row['saved']} to {row['resumed']}: {row['difference']:.0e}, {verdict}")
    failed = [row for row in rows if not row["passed"]]
    seconds = round(time.perf_counter() - start, 1)
    print(f"{len(rows) - len(failed)} of {len(rows)} cells pass, {seconds} s")
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps({"tolerance": TOLERANCE, "seconds": seconds, "cells": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
