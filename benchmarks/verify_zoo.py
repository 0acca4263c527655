"""Run `verify` on a tiny model of every AutoModelForCausalLM type, on two stages and on two shards: `python benchmarks/verify_zoo.py`.

Keeps what was tried in build/reports/verify-zoo.json, goes on from there, and writes the table of docs/verify.md from it. With
--more, the same with four ranks and in bf16, in build/reports/verify-zoo-more.json. Exits with 1 if a type differs or a run ends
without a verdict. Variants of types are left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from forked_proofs import Prover  # noqa: E402
from rich.console import Console  # noqa: E402
from tables import with_tables  # noqa: E402
from zoo import entries  # noqa: E402
from zoo.models import tiny_config  # noqa: E402
from zoo_jobs import options  # noqa: E402


PAGE = ROOT / "docs" / "verify.md"
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
TP2: dict[str, Any] = {"tp_size": 2}
# Column -> settings and dtype.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {"pp2": (PP2, "fp32"), "tp2": (TP2, "fp32")}
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "pp2xtp2": ({**PP2, **TP2}, "fp32"),
    "pp2 bf16": (PP2, "bf16"),
    "tp2 bf16": (TP2, "bf16"),
    "pp2xtp2 bf16": ({**PP2, **TP2}, "bf16"),
}
WRONG = ("differs", "no verdict")


def examine(name: str, settings: dict[str, Any], dtype: str, prover: Prover) -> str:
    """A cell of the table; never raises."""
    try:
        found = prover.verify(tiny_config(name), settings, steps=2, rows=2, dtype=dtype)
    except Exception as error:
        told = [line for line in str(error).splitlines() if line.strip()]
        return f"no verdict: {' ... '.join([*told[:1], *told[-1:]])[:300]}"
    if found.refused:
        return f"refused: {found.refused.splitlines()[0][:160]}"
    return f"{found.grad_max_rel:.1e}" if found.ok else f"differs at {found.first_divergence}, {found.worst[:1]}"


def table(report: dict[str, dict[str, str]], names: list[str], layouts: Iterable[str]) -> list[str]:
    """Of the page."""
    rows = [(name, report[name]) for name in names if name in report]
    columns = list(layouts)
    lines = [f"| type | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | {' | '.join(row[layout].replace('|', '/') for layout in columns)} |" for name, row in rows]
    cells = [row[layout] for _, row in rows for layout in columns]
    refused = sum(cell.startswith("refused") for cell in cells)
    wrong = sum(cell.startswith(WRONG) for cell in cells)
    agree = len(cells) - refused - wrong
    lines += [
        "",
        f"{len(rows)} of {len(names)} types were run, {len(cells)} runs: {agree} agree, {refused} are refused,",
    ]
    lines += [f"{wrong} differ or have no verdict. The numbers are the largest relative difference of a gradient."]
    return lines


def main() -> int:
    """Examine what was not yet, and write the report and the page; returns the exit code."""
    parser = options("Verify every model type on two stages and two shards.", "verify-zoo.json", 300)
    parser.add_argument("names", nargs="*", help="types that are examined anew")
    parser.add_argument("--more", action="store_true", help="four ranks, and bf16")
    parser.add_argument("--fresh", action="store_true", help="forget what was examined before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after them")
    arguments = parser.parse_args()
    layouts, place = (MORE, "verify-zoo-more") if arguments.more else (LAYOUTS, "verify-zoo")
    if arguments.more and arguments.report.name == "verify-zoo.json":
        arguments.report = arguments.report.with_name("verify-zoo-more.json")
    console, begun = Console(), time.monotonic()
    report = json.loads(arguments.report.read_text()) if arguments.report.exists() and not arguments.fresh else {}
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in entries() if "@" not in name]
    for name in arguments.names or [name for name in names if name not in report]:
        if time.monotonic() - begun > arguments.seconds:
            break
        with tempfile.TemporaryDirectory() as kept:
            prover = Prover(Path(kept))
            report[name] = {column: examine(name, *layout, prover) for column, layout in layouts.items()}
        arguments.report.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"[{len(report)}/{len(names)}] {name} {report[name]}", markup=False)
    PAGE.write_text(with_tables(PAGE.read_text(), {place: table(report, names, layouts)}))
    bad = [name for name, row in report.items() if any(row[layout].startswith(WRONG) for layout in layouts)]
    console.print(f"{len(report)} of {len(names)} types; wrong: {bad}", markup=False)
    return 1 if bad or len(report) < len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
