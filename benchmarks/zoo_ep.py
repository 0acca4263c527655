"""Spread the experts of a tiny model of every AutoModelForCausalLM type over two ranks: `python benchmarks/zoo_ep.py`.

The ranks are threads of one process that exchange tokens of two batches of different sizes, in training mode: both losses and
every gradient against the plain model. `--only mixtral gpt_oss` prints these entries and leaves the page.

Writes build/reports/zoo-ep.json and the table of experts in docs/coverage.md; exits with 1 if an entry failed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
from tables import with_tables  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.experts import sweep_experts  # noqa: E402
from zoo.experts_page import TABLE, expert_table, expert_totals  # noqa: E402
from zoo_jobs import PAGE, options, versions, write_report  # noqa: E402


def main() -> int:
    """Sweep, print, write the report and the table; returns the exit code."""
    parser = options("Compare experts on two ranks with one process, for every model type.", "zoo-ep.json", 120)
    parser.add_argument("--only", nargs="+", choices=entries(), metavar="NAME", help="entries; all if not given")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names, rows = arguments.only or entries(), []
    for name in names:
        rows.append(row := sweep_experts(name, arguments.timeout))
        print(f"[{len(rows)}/{len(names)}] {name}: {row.verdict} {row.difference or ''} {row.note[:300]}", flush=True)
    print(*expert_totals(rows, all_types()), sep="\n")
    if not arguments.only:
        write_report(arguments.report, [asdict(row) for row in rows])
        lines = [f"{versions()}.", "", *expert_table(rows, all_types())]
        arguments.page.write_text(with_tables(arguments.page.read_text(), {TABLE: lines}))
    return 1 if any(row.verdict == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
