"""Cut a tiny model of every AutoModelForCausalLM type into pipeline stages and compare: `python benchmarks/zoo_pp.py`.

Every entry of tests/zoo is cut at 2, 3 and 4 stages in one process and trained on 2 gloo ranks. Two processes work on
entries, one entry each at a time; an entry that takes too long counts as failed.

Writes build/reports/zoo-pp.json and, for a full run, docs/coverage.md; exits with 1 if an entry failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
import transformers  # noqa: E402
from rank_runner import RankError, run_ranks  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.page import page, ranks_cell, split_cell, totals  # noqa: E402
from zoo.ranks import TOLERANCE, ranks_main  # noqa: E402
from zoo.sweep import Row, sweep  # noqa: E402


WORKERS = 2


def sweep_entry(arguments: tuple[str, int]) -> Row:
    torch.set_num_threads(1)
    name, seconds = arguments
    return sweep(name, seconds=seconds)


def sweep_all(names: Sequence[str], seconds: int) -> Iterator[Row]:
    """Rows in the order of `names`."""
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        yield from pool.imap(sweep_entry, [(name, seconds) for name in names])


def on_ranks(name: str, folder: Path, seconds: int) -> str:
    """Two training steps on two ranks: "exact", or what went wrong."""
    try:
        results = run_ranks(ranks_main, 2, name, tmp_path=folder, timeout=seconds, env={"ACCELERATE_USE_CPU": "true"})
    except RankError as error:
        raised = [line.strip() for line in str(error).splitlines() if line[:1].isalpha() and "Error" in line]
        told = [line for line in raised if not line.startswith("rank ")]
        return told[0] if told else str(error).splitlines()[-1]
    worst = max(value for result in results for value in result.values())
    return "exact" if worst <= TOLERANCE else f"differs: {results[0]}"


def build_table(rows: Sequence[Row]) -> Table:
    table = Table(title="pipeline stages of every type, compared with the unsplit model (fp32, 1e-5 relative)")
    for heading in ("entry", "class", "2", "3", "4", "2 ranks", "note"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        cells = [split_cell(row, count) for count in (2, 3, 4)]
        table.add_row(row.name, row.class_name, *cells, ranks_cell(row), row.note[:60])
    return table


def main() -> int:
    """Sweep, print the table, write the report and the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare pipeline stages of every model type with the unsplit model.")
    parser.add_argument("names", nargs="*", help="entries; all of them, and the page, if none is given")
    parser.add_argument("--timeout", type=int, default=120, help="seconds an entry may take")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "zoo-pp.json")
    arguments = parser.parse_args()
    console = Console()
    names = arguments.names or entries()
    rows = []
    for row in sweep_all(names, arguments.timeout):
        rows.append(row)
        console.print(f"[{len(rows)}/{len(names)}] {row.name}: {row.verdict} {row.note[:80]}", markup=False)
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows, 1):
            if row.verdict == "exact":
                row.ranks = on_ranks(row.name, Path(folder), arguments.timeout)
                console.print(f"[{number}/{len(rows)}] {row.name} on 2 ranks: {row.ranks[:100]}", markup=False)
    console.print(build_table(rows))
    for line in totals(rows, all_types()):
        console.print(line)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if not arguments.names:
        versions = (
            f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        (ROOT / "docs" / "coverage.md").write_text(page(rows, all_types(), versions))
    return 1 if any(row.verdict == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
