"""Share the rows of a tiny model of every AutoModelForCausalLM type over ranks and compare: `python benchmarks/zoo_sp.py`.

Two gloo processes a group of entries. Writes build/reports/zoo-sp.json, which it goes on from with --resume, and the part of
docs/coverage.md about shared sequences; exits with 1 if an entry was accepted and differs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ["ACCELERATE_USE_CPU"] = "true"

from rank_runner import RankError, run_ranks  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.parts import with_part  # noqa: E402
from zoo.rows import RowsRow, rows_main  # noqa: E402
from zoo.rows_page import rows_page, rows_totals  # noqa: E402
from zoo_jobs import PAGE, options, versions, write_report  # noqa: E402


TOGETHER = 8  # entries of a launch; after a crash each of them runs alone


def sweep(names: Sequence[str], ring: bool, seconds: int, folder: Path) -> list[RowsRow]:
    """The rows of some entries; one that crashes or hangs costs only its own."""
    try:
        return list(run_ranks(rows_main, 2, list(names), ring, tmp_path=folder, timeout=seconds * len(names))[0])
    except RankError as error:
        if len(names) > 1:
            return [row for name in names for row in sweep([name], ring, seconds, folder)]
        lines = str(error).strip().splitlines()
        return [RowsRow(names[0], 2, note=lines[-1][:200])]


def main() -> int:
    """Sweep, write the report and the page; returns the exit code."""
    parser = options("Compare ranks that share rows with one process, for every model type.", "zoo-sp.json", 60)
    parser.add_argument("names", nargs="*", help="entries; all of them if none is given")
    parser.add_argument("--resume", action="store_true", help="go on from the report: what it has is not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further group after so long")
    arguments = parser.parse_args()
    known = json.loads(arguments.report.read_text()) if arguments.resume and arguments.report.exists() else []
    rows = {row["name"]: RowsRow(**row) for row in known}
    names, until = arguments.names or entries(), time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        for ring in (False, True):
            left = [name for name in names if (_lacks_ring(rows.get(name)) if ring else name not in rows)]
            for start in range(0, len(left), TOGETHER):
                if time.monotonic() > until:
                    break
                for row in sweep(left[start : start + TOGETHER], ring, arguments.timeout, Path(folder)):
                    rows[row.name] = replace(rows[row.name], ring=row.verdict, ring_note=row.note) if ring else row
                    print(f"{row.name}{' as a ring' * ring}: {row.verdict} {row.dtype} {row.note[:120]}", flush=True)
                write_report(arguments.report, [asdict(row) for row in rows.values()])
    print(*rows_totals(list(rows.values()), all_types()), sep="\n")
    if not arguments.names:
        PAGE.write_text(with_part(PAGE.read_text(), rows_page(list(rows.values()), all_types(), versions())))
    return 1 if any("failed" in (row.verdict, row.ring) for row in rows.values()) else 0


def _lacks_ring(row: RowsRow | None) -> bool:
    """Whether an entry is exact with heads exchanged, and was not tried as a ring."""
    return row is not None and row.verdict == "exact" and not row.ring


if __name__ == "__main__":
    sys.exit(main())
