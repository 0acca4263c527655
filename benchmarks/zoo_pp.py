"""Cut a tiny model of every AutoModelForCausalLM type into pipeline stages and compare: `python benchmarks/zoo_pp.py`.

Every entry of tests/zoo is cut at 2, 3 and 4 stages in one process and trained on 2 gloo ranks. Two processes work on
entries, one entry each at a time; an entry that takes too long counts as failed.

Writes build/reports/zoo-pp.json and, for a full run, the first part of docs/coverage.md; exits with 1 if an entry failed.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from rank_runner import RankError, run_ranks  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.page import page, ranks_cell, split_cell, totals  # noqa: E402
from zoo.parts import with_part  # noqa: E402
from zoo.ranks import TOLERANCE, ranks_main  # noqa: E402
from zoo.sweep import Row, sweep  # noqa: E402
from zoo_jobs import PAGE, in_workers, options, versions, write_report  # noqa: E402


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
    parser = options("Compare pipeline stages of every model type with the unsplit model.", "zoo-pp.json", 120)
    parser.add_argument("names", nargs="*", help="entries; all of them, and the page, if none is given")
    arguments = parser.parse_args()
    console = Console()
    names = arguments.names or entries()
    rows = []
    for row in in_workers(functools.partial(sweep, seconds=arguments.timeout), names):
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
    write_report(arguments.report, [asdict(row) for row in rows])
    if not arguments.names:
        PAGE.write_text(with_part(PAGE.read_text(), page(rows, all_types(), versions())))
    return 1 if any(row.verdict == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
