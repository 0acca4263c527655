"""Put bugs of known kinds into a layout and see whether `verify` finds each: `python benchmarks/mutations.py`.

Keeps what was tried in build/reports/mutations.json, goes on from there, and writes the tables of docs/verify.md from it. Exits
with 1 if a bug was not found, was placed wrongly or never ran, or if a layout without a bug was said to differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
os.environ.update(HF_HUB_OFFLINE="1")

from forked_proofs import Prover  # noqa: E402
from mutation_bugs import FIRED  # noqa: E402
from mutation_list import ALL_MODELS, BUGS, SOUND, Bug, Sound  # noqa: E402
from rich.console import Console  # noqa: E402
from tables import with_tables  # noqa: E402

from hf_parallel import ParallelError  # noqa: E402


PAGE = ROOT / "docs" / "verify.md"
REPORT = ROOT / "build" / "reports" / "mutations.json"


def try_bug(bug: Bug, prover: Prover) -> dict[str, Any]:
    """What `verify` says of a bug."""
    row: dict[str, Any] = {"kind": bug.kind, "found": False, "layout": "", "module": "", "part": "", "ran": False}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments = {"tamper": f"{bug.home}:{bug.name}", **(bug.more or {})}
        try:
            verdict = prover.verify(ALL_MODELS[bug.model], bug.settings, folder, **arguments)
        except ParallelError as error:
            return row | {"told": f"raised: {error}"}
        row["ran"] = any(folder.glob(f"compared/rank*/{FIRED}"))
    row |= {"layout": verdict.layout, "ok": verdict.ok, "told": verdict.refused or verdict.stopped}
    place = verdict.first_divergence
    if place is None:
        return row | {"worst": verdict.worst[:3]}
    row |= {"module": place["module"], "part": place["kind"], "microbatch": place["microbatch"]}
    return row | {"found": row["ran"] and not verdict.ok and bug.is_placed(place)}


def try_sound(case: Sound, prover: Prover) -> dict[str, Any]:
    """What `verify` says of a layout without a bug."""
    about = {"model": case.model, "layout": case.layout, "dtype": case.dtype}
    try:
        verdict = prover.verify(ALL_MODELS[case.model], case.settings, dtype=case.dtype, **(case.more or {}))
    except ParallelError as error:
        return {**about, "ok": False, "told": str(error)}
    sizes = {"loss": verdict.loss_max_rel, "gradient": verdict.grad_max_rel, "parameter": verdict.param_max_rel}
    used = max((each["relative"] / each["allowed"] for each in verdict.worst), default=0.0)
    row = {**about, "ok": verdict.ok, "used": used, **sizes}
    wrong = {"told": verdict.refused or verdict.stopped, "at": verdict.first_divergence, "worst": verdict.worst[:3]}
    return row | ({} if verdict.ok else wrong)


def tables(report: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Of the page."""
    tried = [report[bug.key] for bug in BUGS if bug.key in report]
    lines = ["| bug | layout | found | named | as |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['kind']} | {row['layout']} | {'yes' if row['found'] else 'no'} | {row['module'] or 'no module'} | {row['part']} |"
        for row in tried
    ]
    found = sum(row["found"] for row in tried)
    named = sum(bool(row["found"] and row["module"]) for row in tried)
    lines += [
        "",
        f"{found} of {len(tried)} found, {named} of them by their module; {len(tried)} of {len(BUGS)} bugs tried.",
    ]
    sound = [row for case in SOUND if (row := report.get(case.key)) is not None]
    runs = [
        "| model | layout | dtype | agrees | gradients differ by | of what is allowed |",
        "|---|---|---|---|---|---|",
    ]
    runs += [
        f"| {row['model']} | {row['layout']} | {row['dtype']} | {'yes' if row['ok'] else 'no'} "
        f"| {row.get('gradient') or 0:.1e} | {row.get('used', 0):.0%} |"
        for row in sound
    ]
    alarms = sum(not row["ok"] for row in sound)
    runs += ["", f"{alarms} false alarms in {len(sound)} runs, of {len(SOUND)}."]
    return {"mutations": lines, "sound": runs}


def main() -> int:
    """Try what was not tried yet; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs, or keys of runs without one, that are tried anew")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after them")
    parser.add_argument("--report", type=Path, default=REPORT, help="of another one no tables are written")
    arguments = parser.parse_args()
    console, begun = Console(), time.monotonic()
    report = json.loads(arguments.report.read_text()) if arguments.report.exists() and not arguments.fresh else {}
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept:
        prover = Prover(Path(kept))
        work: dict[str, Callable[[], dict[str, Any]]] = {bug.key: lambda bug=bug: try_bug(bug, prover) for bug in BUGS}
        work |= {case.key: lambda case=case: try_sound(case, prover) for case in SOUND}
        chosen = [key for key in work if key.split()[0] in arguments.names or key in arguments.names]
        for key in chosen or [key for key in work if key not in report]:
            if time.monotonic() - begun > arguments.seconds:
                break
            report[key] = work[key]()
            arguments.report.write_text(json.dumps(report, indent=1) + "\n")
            if arguments.report == REPORT:
                PAGE.write_text(with_tables(PAGE.read_text(), tables(report)))
            console.print(key, report[key], markup=False)
    bad = [key for key, row in report.items() if not row.get("found", row.get("ok"))]
    left = len([key for key in work if key not in report])
    console.print(f"{len(report)} tried, {left} left; wrong: {bad}", markup=False)
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
