"""Kill one rank of a launched job at a random moment, again and again: `python benchmarks/restart_test.py`.

Each round launches 2 x 2 ranks (two stages, two replicas) with `accelerate launch --max_restarts`, which save in memory every step
and on disk every fourth. A rank of a seeded sequence gives itself SIGKILL: at the begin of a step, in a forward pass, or while a
snapshot is written; in some rounds another one does so after the restart. The run must go on by itself, lose one step at most, and
have every loss and norm of the run that was never killed, to 1e-5; its memory must be given back.

Writes build/reports/restart-test.json; exits with 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from restart_cases import STEPS, Kill, RestartJob, differences  # noqa: E402


SECTION = {
    "pp_size": 2,
    "pipeline": {"num_microbatches": 2},
    "global_batch_size": 8,
    "checkpoint": {"memory_steps": 1},
}
PLACES = ("begin", "forward", "forward", "snapshot")


def kills_of(source: random.Random) -> list[Kill]:
    """One kill, or one more after the restart."""
    kills, after = [], 0
    for attempt in range(source.choice((1, 1, 2))):
        step, where = source.randint(after + 1, STEPS - 2), source.choice(PLACES)
        # Rank 0 gives snapshots their names.
        kills.append(Kill(0 if where == "snapshot" else source.randrange(4), step, where, attempt))
        after = step
        if after >= STEPS - 3:
            break
    return kills


def problems_of(job: RestartJob, straight: RestartJob, code: int) -> list[str]:
    """What is wrong with a round."""
    if code:
        return [f"the launcher ended with {code}: {job.log[-600:]}"]
    found = differences(job, straight)
    struck = sum("killed" in entry for entry in job.diary)
    if struck != len(job.kills):
        return [*found, f"{struck} of {len(job.kills)} kills happened"]
    for kill in job.kills:
        done = kill.step - (kill.where == "snapshot")
        first = job.first_step(kill.attempt + 1)
        if first is None:
            found.append(f"after {kill} the next attempt did no step: {job.log[-3000:]}")
        elif first != done + 1:
            found.append(f"after {kill} the run began with step {first}, not {done + 1}")
    return found + ([f"{job.memory} is left"] if job.memory.exists() else [])


def main() -> int:
    """Run the rounds, write the report; returns the exit code."""
    parser = argparse.ArgumentParser(description="Kill one of 2 x 2 launched ranks, again and again.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "restart-test.json")
    arguments = parser.parse_args()
    source, rounds, start = random.Random(arguments.seed), list[dict[str, Any]](), time.perf_counter()
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        straight = RestartJob(Path(folder) / "straight", SECTION)
        if straight.run():
            print(straight.log[-2000:])
            return 1
        for number in range(arguments.rounds):
            job = RestartJob(Path(folder) / str(number), SECTION, kills_of(source))
            problems = problems_of(job, straight, job.run())
            seconds = job.seconds_until_training() if not problems else []
            phases = job.phases() if not problems else []
            kills = [vars(kill) for kill in job.kills]
            rounds.append({"kills": kills, "seconds": seconds, "phases": phases, "problems": problems})
            print(json.dumps(rounds[-1]), flush=True)
            passed = sum(not each["problems"] for each in rounds)
            report = {"seed": arguments.seed, "passed": passed, "rounds": rounds}
            arguments.report.write_text(json.dumps(report, indent=1))
    waits = [second for each in rounds for second in each["seconds"]] or [0.0]
    print(
        f"{passed} of {len(rounds)} rounds went on by themselves on the same trajectory; {len(waits)} restarts took {min(waits):g} to "
        f"{max(waits):g} s until the next step; {time.perf_counter() - start:.0f} s"
    )
    return 0 if passed == len(rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
