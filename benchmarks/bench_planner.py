"""The planner against published results: errors of tables that were fitted, held out in turn, and never fitted.

`--fit` fits the constants and writes them; `--held-out` fits once for each group of tables without it; `--unseen FILE` tries
tables of your own, an empty step_s is a layout that ran out of memory. Writes
build/reports/bench-planner.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planner_fit import BEGIN, GROUPS, NOT_FITTED, fit, fitted_of
from benchmarks.planner_rows import Row, bias, coverage, errors, load, mape, regret, regrets
from hf_parallel.planner.constants import FILE, Constants, constants


Report = dict[str, dict[str, Any]]
MOST_REGRET = "vtrain_multi"  # the multi-node rows
ALLOCATED = ("zero_bubble", "nanotron")  # tables whose memory is what the allocator handed out


def figures(rows: Sequence[Row], c: Constants) -> dict[str, Any]:
    """What a table says of the planner."""
    ran = [row for row in rows if row.ran]
    logs = errors(ran, c, exact=True)
    found: dict[str, Any] = {"rows": len(ran), "error": mape(logs), "bias": bias(logs), "inside": coverage(ran, c)}
    ratios = [_allocated(row) / row.memory - 1 for row in ran if row.memory]
    if ratios:
        found["memory"] = sum(map(abs, ratios)) / len(ratios)
        found["memory_bias"] = sum(ratios) / len(ratios)
    lacking = [row for row in rows if not row.ran]
    if lacking:
        found["out_of_memory"] = len(lacking)
        found["refused"] = sum(not _fits(row) for row in lacking)
    found["wrongly_refused"] = sum(not _fits(row) for row in ran)
    lost = regret(ran, c)
    return found if lost is None else found | {"regret": lost}


def _allocated(row: Row) -> float:
    """Bytes that the allocator hands out where that was published, else all that a process holds."""
    terms = row.estimate().memory_bytes
    return sum(terms.values()) - (terms["overhead"] if row.table.startswith(ALLOCATED) else 0.0)


def _fits(row: Row) -> bool:
    return row.estimate().total_bytes <= row.cluster.gpu_bytes


def show(name: str, found: Mapping[str, Any], note: str = "") -> None:
    words = [f"{name:20s} n={found['rows']:4d} error {found['error']:6.1%}  bias {found['bias']:+6.1%}"]
    words.append(f"inside {found['inside']:4.0%}")
    if "memory" in found:
        words.append(f"memory {found['memory']:.1%} ({found['memory_bias']:+.1%})")
    if "regret" in found:
        words.append(f"regret {found['regret']:.1%}")
    if "refused" in found:
        words.append(f"refused {found['refused']} of {found['out_of_memory']}")
    if found["wrongly_refused"]:
        words.append(f"wrongly refused {found['wrongly_refused']}")
    print("  ".join([*words, note]).rstrip())


def show_tables(tables: Mapping[str, Sequence[Row]], c: Constants) -> Report:
    report = {name: figures(rows, c) for name, rows in tables.items()}
    for name, found in report.items():
        show(name, found, "(not counted)" if name in NOT_FITTED else "")
    counted = [found for name, found in report.items() if name not in NOT_FITTED]
    for key in ("error", "inside"):
        print(f"mean of tables, {key}: {sum(found[key] for found in counted) / len(counted):.1%}")
    return report


def show_regret(rows: Sequence[Row], c: Constants) -> None:
    for key, (best, chosen) in regrets(rows, c).items():
        shown = [f"tp{r.spec.tp} pp{r.spec.pp} dp{r.spec.dp} mb{r.spec.micro_batch}" for r in (best, chosen)]
        print(f"  {key}: best {shown[0]}, chosen {shown[1]}, regret {chosen.step_s / best.step_s - 1:.1%}")


def show_memory(tables: Mapping[str, Sequence[Row]]) -> None:
    for row in (row for rows in tables.values() for row in rows if row.memory):
        terms = row.estimate().memory_bytes
        parts = " ".join(f"{name[:6]} {size / 1e9:.1f}" for name, size in terms.items())
        ratio = _allocated(row) / row.memory - 1 if row.memory else 0.0
        print(f"  {row.table} {row.name:40s} {(row.memory or 0) / 1e9:6.1f} GB {ratio:+6.1%}  {parts}")


def show_held_out(tables: Mapping[str, Sequence[Row]], judged: Constants) -> Report:
    """Each group of tables with constants that were fitted without it."""
    report: Report = {}
    for group, names in GROUPS.items():
        c = fit({name: rows for name, rows in tables.items() if name not in names}, judged)
        report[group] = figures([row for name in names for row in tables[name]], c)
        show(group, report[group])
        for name in names if len(names) > 1 else ():
            report[f"{group}: {name}"] = figures(tables[name], c)
            show(f"    {name}", report[f"{group}: {name}"])
    print(f"mean of groups: {sum(report[group]['error'] for group in GROUPS) / len(GROUPS):.1%}")
    return report


def write_constants(c: Constants) -> None:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    content["fitted"] = {key: float(f"{getattr(c, key):.4g}") for key in BEGIN}
    FILE.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(content["fitted"])
    constants.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit on all tables and write the constants")
    parser.add_argument("--held-out", action="store_true", help="fit without each group of tables")
    parser.add_argument("--unseen", type=Path, help="more tables, with the columns of planner_tables.csv, not fitted")
    parser.add_argument("--output", type=Path, default=Path("build/reports/bench-planner.json"))
    args = parser.parse_args()
    tables = load()
    if args.fit:
        write_constants(fit(fitted_of(tables), constants()))
    print("Tables of the fit")
    report: dict[str, Report] = {"fitted": show_tables(tables, constants())}
    show_regret(tables[MOST_REGRET], constants())
    show_memory(tables)
    if args.unseen:
        print("Tables that were never fitted")
        report["unseen"] = show_tables(load(args.unseen), constants())
    if args.held_out:
        print("Held out of the fit in turn")
        report["held_out"] = show_held_out(fitted_of(tables), constants())
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
