"""Kill a training job again and again, and start it again: `python benchmarks/kill_test.py`.

Two ranks train a tiny Llama with dropout and save every other step. One rank or both get SIGKILL, at random moments of a
seeded sequence or at given points of a save; the same command is then started again. After every kill the newest complete
checkpoint must be at least as new as before; every step that any attempt took must have the loss and the norm of the run
that was never killed, bit by bit; a rank that lost its peer must end by itself.

Writes build/reports/kill-test.json; exits with 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kill_cases import STEPS, Kill, diary, lives_of, make_job, random_kills  # noqa: E402


LAYOUTS = ("pp2", "zero1", "fsdp2", "tp2")


def at_most(kills: Iterator[Kill], left: list[int]) -> Iterator[Kill]:
    """As many kills as are left over all runs."""
    while left[0]:
        left[0] -= 1
        yield next(kills)


def run_life(layout: str, folder: Path, kills: Iterator[Kill]) -> list[dict[str, Any]]:
    """Reports of all attempts of one run under one layout; compares its steps with those of a run without kills."""
    straight = make_job(layout, folder / "straight")
    list(lives_of(straight, iter(())))
    expected = {step: rest for step, *rest in diary(folder / "straight")}
    reports = []
    for report in lives_of(make_job(layout, folder / "killed"), kills):
        reports.append({"layout": layout, **report})
        print(json.dumps(reports[-1]), flush=True)
    for step, *found in diary(folder / "killed"):
        if found != expected[step]:
            raise AssertionError(f"{layout}: step {step} has loss and norm {found}, without kills {expected[step]}")
    if sorted(expected) != list(range(1, STEPS + 1)):
        raise AssertionError(f"{layout}: the run without kills has steps {sorted(expected)}")
    return reports


def main() -> int:
    """Run lives until all kills are spent, write the report; returns the exit code."""
    parser = argparse.ArgumentParser(description="Kill a training job again and again, and start it again.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "kill-test.json")
    arguments = parser.parse_args()
    start, left, reports, failure = time.perf_counter(), [arguments.kills], [], None
    kills = random_kills(arguments.seed)
    try:
        for index in range(arguments.kills):
            if not left[0]:
                break
            with tempfile.TemporaryDirectory() as folder:
                reports += run_life(LAYOUTS[index % len(LAYOUTS)], Path(folder), at_most(kills, left))
    except AssertionError as error:
        failure = str(error)
    seconds = round(time.perf_counter() - start, 1)
    killed = [report["kill"] for report in reports if report["kill"] is not None]
    inside = sum(bool(kill["point"]) for kill in killed)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(
        json.dumps({"seed": arguments.seed, "seconds": seconds, "failure": failure, "attempts": reports}, indent=1)
    )
    verdict = failure or "no checkpoint lost, every step as without kills"
    print(f"{len(killed)} kills, {inside} of them inside a save, {seconds} s: {verdict}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
