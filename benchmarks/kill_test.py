"""Kill a training job again and again, and start it again: `python benchmarks/kill_test.py`.

Two ranks train a tiny Llama with dropout and save every other step. One rank or both get SIGKILL, at random moments of a
seeded sequence or at given points of a save; the same command is then started again. After every kill the newest complete
checkpoint must be at least as new as before; every step that any attempt took must have the loss and the norm of the run
that was never killed, bit by bit; a rank that lost its peer must end by itself.

Writes build/reports/kill-test.json; exits with 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kill_cases import Kill, diary, lives_of, make_job, random_kills  # noqa: E402


LAYOUTS = ("pp2", "zero1", "fsdp2", "tp2")
STEPS = 40


class Budget:
    """Random kills until enough of them hit a job that was still running.

    Args:
        seed: Of the sequence.
        hits: How many.
    """

    def __init__(self, seed: int, hits: int) -> None:
        self._kills, self.left = random_kills(seed), hits

    def __iter__(self) -> Iterator[Kill]:
        while self.left:
            yield next(self._kills)


def run_life(layout: str, behind: bool, folder: Path, budget: Budget) -> list[dict[str, Any]]:
    """Reports of all attempts of one run under one layout; compares its steps with those of a run without kills."""
    parallel = {"checkpoint": {"async_save": behind}}
    list(lives_of(make_job(layout, folder / "straight", STEPS, **parallel), iter(())))
    expected = {step: rest for step, *rest in diary(folder / "straight")}
    reports = []
    for report in lives_of(make_job(layout, folder / "killed", STEPS, **parallel), iter(budget)):
        budget.left -= not report["ended"]
        reports.append({"layout": layout, "async_save": behind, **report})
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
    start, budget, reports, failure = time.perf_counter(), Budget(arguments.seed, arguments.kills), [], None
    lives = itertools.cycle([*((layout, False) for layout in LAYOUTS), ("zero1", True)])
    try:
        while budget.left and failure is None:
            with tempfile.TemporaryDirectory() as folder:
                reports += run_life(*next(lives), Path(folder), budget)
    except AssertionError as error:
        failure = str(error)
    seconds = round(time.perf_counter() - start, 1)
    killed = [report["kill"] for report in reports if not report["ended"]]
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
