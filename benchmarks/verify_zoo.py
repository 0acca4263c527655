"""Run `verify` on a tiny model of every AutoModelForCausalLM type, on two stages and on two shards: `python benchmarks/verify_zoo.py`.

Writes build/reports/verify-zoo.json and, for a full run, the second table of docs/verify.md; exits with 1 if a type differs
or a run ends without a verdict. Types that the zoo cannot build, and those that need more than text, are left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from rich.console import Console  # noqa: E402
from tables import with_tables  # noqa: E402
from zoo import entries  # noqa: E402
from zoo.models import tiny_config  # noqa: E402
from zoo_jobs import in_workers, options, write_report  # noqa: E402

from hf_parallel import verify  # noqa: E402


PAGE = ROOT / "docs" / "verify.md"
LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pp_size": 2, "num_microbatches": 2}, "tp2": {"tp_size": 2}}


def examine(name: str) -> dict[str, str]:
    """A cell for each layout; never raises."""
    row = {"type": name}
    for layout, settings in LAYOUTS.items():
        try:
            found = verify(tiny_config(name), settings, steps=2, rows=2)
        except Exception as error:
            row[layout] = f"no verdict: {str(error).splitlines()[0][:120]}"
            continue
        if found.refused:
            row[layout] = f"refused: {found.refused.splitlines()[0][:120]}"
        else:
            row[layout] = f"{found.grad_max_rel:.1e}" if found.ok else f"differs at {found.first_divergence}"
    return row


def main() -> int:
    """Examine, print, write the report and the page; returns the exit code."""
    parser = options("Verify every model type on two stages and two shards.", "verify-zoo.json", 300)
    parser.add_argument("names", nargs="*", help="types; all of them, and the page, if none is given")
    arguments = parser.parse_args()
    console = Console()
    names = arguments.names or [name for name in entries() if "@" not in name]
    rows = []
    for row in in_workers(examine, names):
        rows.append(row)
        console.print(f"[{len(rows)}/{len(names)}] {row}", markup=False)
    write_report(arguments.report, rows)
    bad = [row for row in rows if any(row[layout].startswith(("differs", "no verdict")) for layout in LAYOUTS)]
    if not arguments.names:
        lines = [f"| type | {' | '.join(LAYOUTS)} |", "|---|---|---|"]
        lines += [f"| {row['type']} | {' | '.join(row[layout] for layout in LAYOUTS)} |" for row in rows]
        PAGE.write_text(with_tables(PAGE.read_text(), {"verify-zoo": lines}))
    console.print(f"{len(rows) - len(bad)} of {len(rows)} types agree or are refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
