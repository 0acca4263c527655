"""Put LoRA on a tiny model of every AutoModelForCausalLM type and compare: `python benchmarks/zoo_lora.py`.

Every entry of tests/zoo with adapters on all linear layers (PEFT's all-linear), in training mode, as two pipeline stages
and as two tensor-parallel ranks in one process: loss and every adapter's gradient against the PEFT model. Two processes
work on entries, one entry each at a time. `--only llama gpt2` renews the rows of these entries.

Writes build/reports/zoo-lora.json and the table of adapters in docs/coverage.md after each entry; exits with 1 if one
failed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import peft  # noqa: E402
from tables import with_tables  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.lora import LoraRow, sweep_lora  # noqa: E402
from zoo.lora_page import TABLE, lora_table  # noqa: E402
from zoo_jobs import PAGE, in_workers, options, versions, write_report  # noqa: E402


def known(report: Path) -> dict[str, dict[str, Any]]:
    """The rows of the last report."""
    return {row["name"]: row for row in json.loads(report.read_text())} if report.exists() else {}


def write_page(path: Path, rows: Sequence[LoraRow]) -> None:
    text = path.read_text()
    lines = lora_table(text, rows, entries(), all_types())
    path.write_text(with_tables(text, {TABLE: [f"{versions()}, peft {peft.__version__}.", "", *lines]}))


def told(row: LoraRow) -> str:
    """A row in one line of the output."""
    found = [f"{layout} {one.verdict} {one.dtype} {one.note[:120]}".strip() for layout, one in row.layouts.items()]
    return "; ".join(found) or f"{row.verdict} {row.note[:160]}"


def main() -> int:
    """Sweep, print, write the report and the table; returns the exit code."""
    parser = options("Compare LoRA on stages and ranks of every model type with one process.", "zoo-lora.json", 240)
    parser.add_argument("--only", nargs="+", choices=entries(), metavar="NAME", help="entries; all if not given")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    names = arguments.only or entries()
    report, rows = known(arguments.report), list[LoraRow]()
    for row in in_workers(functools.partial(sweep_lora, seconds=arguments.timeout), names):
        rows.append(row)
        report[row.name] = asdict(row)
        print(f"[{len(rows)}/{len(names)}] {row.name}: {told(row)}", flush=True)
        write_report(arguments.report, [report[name] for name in entries() if name in report])
        write_page(arguments.page, rows)
    failed = [row.name for row in rows if row.failed]
    print(f"{len(failed)} of {len(rows)} entries failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
