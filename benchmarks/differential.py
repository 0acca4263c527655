"""Train random set-ups on a mesh and on one process, and compare: `python benchmarks/differential.py --count 300 --seed 0`.

Each seed is a set-up: model, layout, schedule, ZeRO, precision, data, loss, callback, optimizer, resuming, Trainer or raw
loop (`differential_cases`). Losses, gradient norms, first gradients and last parameters must equal those of one process (of
stock DDP where rows of a process are averaged first) to `TOLERANCE`; in bf16 to five times what cutting the batches in another
way changes on one process, or twice what bf16 itself does. A set-up may be refused before its first update. Whatever differs,
crashes or hangs is run again alone, then shrunk to the fewest features that still do, and written as a script of its own
under build/differential.

Writes build/reports/differential.json; exits with 1 if anything differs, crashes or hangs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
PLACES = [ROOT, ROOT / "tests", ROOT / "benchmarks"]
sys.path[:0] = [str(place) for place in PLACES if str(place) not in sys.path]

from differential_cases import Setup, consistent, draw, script  # noqa: E402
from differential_ranks import (  # noqa: E402
    TOLERANCE,
    Job,
    Verdict,
    difference_of,
    facts_of,
    judge,
    names_apart,
    preload,
    run_jobs,
)


NOISE_TIMES = 5.0
ROUNDING_TIMES = 2.0
MOST_ROUNDING = 1e-3  # of a tensor that is not rounding alone
TOGETHER = 24  # set-ups judged, and written down, at a time
Filter = tuple[str, str]


class Runner:
    """Runs set-ups in a folder; every run gets a name of its own.

    Args:
        folder: For scripts and what ranks write.
        timeout_s: Seconds that a launch may take.
        sources: Seed -> text of a script that is run on the mesh in place of the set-up's own (planted bugs).
    """

    def __init__(self, folder: Path, timeout_s: float = 60.0, sources: dict[int, str] | None = None) -> None:
        self.folder, self.timeout_s, self.sources = folder, timeout_s, sources or {}
        self.runs = 0

    def verdicts(self, setups: list[Setup], together: int = 12) -> list[Verdict]:
        """Run references, then meshes; one verdict a set-up."""
        pairs = []
        for setup in setups:
            self.runs += 1
            name = f"{self.runs}-{setup.seed}"
            own = self.sources.get(setup.seed, "")
            pairs.append((Job(f"{name}-mesh", setup, True, own), Job(f"{name}-reference", reference_of(setup), False)))
        run_jobs([reference for _, reference in pairs], self.folder, self.timeout_s)
        known = [pair for pair in pairs if not any("error" in facts for facts in facts_of(pair[1], self.folder))]
        run_jobs([job for job, _ in known], self.folder, self.timeout_s, together)
        found = [judge(job, reference, self.folder) for job, reference in pairs]
        return [self._with_noise(*pair, verdict) for pair, verdict in zip(pairs, found, strict=True)]

    def _with_noise(self, job: Job, reference: Job, verdict: Verdict) -> Verdict:
        """How far is one process from itself?

        With the batch cut in another way, whose sums round differently; in bf16 also without bf16: a sharded layer rounds
        what its parts give, which no other cut of a batch does, and may be as far off as rounding itself. Tensors that are
        nothing but rounding there (the bias of keys, whose gradient is zero, under an optimizer that divides by its size) do not count.
        """
        if verdict.word != "differs" or math.isinf(verdict.difference):
            return verdict
        other = regrouped(job.setup)
        again = None if other is None else self._again(other, reference, "regrouped")
        nothing = frozenset[str]()
        if again is not None and not job.setup.bf16:
            nothing = names_apart(again, reference, self.folder, MOST_ROUNDING)
        noise = 0.0 if again is None else NOISE_TIMES * difference_of(again, reference, self.folder, nothing)[0]
        if job.setup.bf16 and (exact := self._again(job.setup.replaced(bf16=False), reference, "fp32")) is not None:
            noise = max(noise, ROUNDING_TIMES * difference_of(exact, reference, self.folder)[0])
        return judge(job, reference, self.folder, noise, nothing)

    def _again(self, setup: Setup, reference: Job, name: str) -> Job | None:
        """Another run on one process; None if it does not finish."""
        again = Job(f"{reference.name}-{name}", setup, False)
        run_jobs([again], self.folder, self.timeout_s)
        return None if any("error" in facts for facts in facts_of(again, self.folder)) else again


def reference_of(setup: Setup) -> Setup:
    """What a mesh is compared with.

    Stock DDP averages in the first backward pass after a forward only: of one loss that is backpropagated twice it would
    leave the second half on each process. Both halves at once are the same.
    """
    return setup.replaced(driver="plain") if setup.stock and setup.driver == "half_twice" else setup


def regrouped(setup: Setup) -> Setup | None:
    """The same steps from smaller batches, or from larger ones; where none can be, from weights moved at rounding level."""
    if setup.stock:
        return None
    alone = setup.replaced(tp=1, pp=1, dp=1, settings={}, recompute="")
    rows, steps = setup.rows * setup.dp, setup.accumulation
    if setup.evaluate or (rows == 1 and steps == 1):
        return None if setup.before else alone.replaced(before="nudged")
    changed = {"rows": 1, "accumulation": rows * steps} if rows > 1 else {"rows": steps, "accumulation": 1}
    return alone.replaced(**changed)


# -- shrinking -------------------------------------------------------------------------------------------------------


def simpler(setup: Setup) -> list[Setup]:
    """Set-ups with one feature less."""
    plain, found = Setup(seed=setup.seed), []
    for field in dataclasses.fields(Setup):
        if field.name in ("seed", "settings", "tp", "pp", "dp", "steps"):
            continue
        if getattr(setup, field.name) != getattr(plain, field.name):
            found.append(setup.replaced(**{field.name: getattr(plain, field.name)}))
    for key in setup.settings:
        found.append(setup.replaced(settings={k: v for k, v in setup.settings.items() if k != key}))
        inner = setup.settings[key]
        for name in inner if isinstance(inner, dict) and len(inner) > 1 else ():
            found.append(
                setup.replaced(settings=setup.settings | {key: {k: v for k, v in inner.items() if k != name}})
            )
    for axis in ("tp", "pp", "dp"):
        size = getattr(setup, axis)
        if size > 1 and setup.world_size // size > 1:
            found.append(setup.replaced(**{axis: 1}, settings=settings_without(setup.settings, axis)))
        if size > 2:
            found.append(setup.replaced(**{axis: 2}))
    if setup.resume is None:
        found += [setup.replaced(steps=steps) for steps in (1, 2) if steps < setup.steps]
    return [one for one in found if consistent(one) == one]


def settings_without(settings: dict[str, Any], axis: str) -> dict[str, Any]:
    """Settings that have an effect without an axis."""
    read = {
        "pp": ("num_microbatches", "schedule"),
        "tp": ("sequence_parallel", "vocab_parallel_loss"),
        "dp": ("zero", "data_parallel"),
    }[axis]
    return {key: value for key, value in settings.items() if key not in read}


def shrink(setup: Setup, word: str, runner: Runner, rounds: int = 8) -> tuple[Setup, Verdict | None]:
    """The fewest features that still end in `word`: in each round all simpler set-ups run at once."""
    last: Verdict | None = None
    for _ in range(rounds):
        choices = simpler(setup)
        verdicts = runner.verdicts(choices)
        failing = [(one, verdict) for one, verdict in zip(choices, verdicts, strict=True) if verdict.word == word]
        if not failing:
            break
        joined = setup
        for one, _ in failing:
            joined = merged(joined, setup, one)
        if len(failing) > 1 and consistent(joined) == joined and joined.world_size > 1:
            verdict = runner.verdicts([joined])[0]
            if verdict.word == word:
                setup, last = joined, verdict
                continue
        setup, last = failing[0]
    return setup, last


def merged(into: Setup, base: Setup, changed: Setup) -> Setup:
    """`into` with what `changed` has other than `base`."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(Setup):
        old, new = getattr(base, field.name), getattr(changed, field.name)
        if field.name == "settings":
            gone = [key for key in old if key not in new]
            changes["settings"] = {key: value for key, value in into.settings.items() if key not in gone}
        elif old != new:
            changes[field.name] = new
    return into.replaced(**changes)


# -- the command -----------------------------------------------------------------------------------------------------


def wanted(setup: Setup, only: list[Filter], skip: list[Filter]) -> bool:
    def has(name: str, value: str) -> bool:
        return value in (str(getattr(setup, name)), "*" if getattr(setup, name) != getattr(Setup(), name) else None)

    return all(has(*one) for one in only) and not any(has(*one) for one in skip)


def run_all(setups: list[Setup], runner: Runner, report: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Run in portions; the report is written after each. What fails beside others is run again alone."""
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for first in range(0, len(setups), TOGETHER):
        portion = setups[first : first + TOGETHER]
        verdicts = runner.verdicts(portion)
        doubtful = [index for index, verdict in enumerate(verdicts) if verdict.bad]
        for index in doubtful:
            again = runner.verdicts([portion[index]], together=1)[0]
            if not again.bad:
                again.text = (
                    f"only after other runs in the same process: {verdicts[index].word}: {verdicts[index].text}"
                )
                again.word = verdicts[index].word
            verdicts[index] = again
        for setup, verdict in zip(portion, verdicts, strict=True):
            rows.append({"setup": setup.as_text(), **dataclasses.asdict(verdict)})
            if verdict.bad:
                print(f"{verdict.word}: {verdict.text.splitlines()[0][:300]}\n    {setup.as_text()}", flush=True)
        seconds = round(time.perf_counter() - start, 1)
        counts = dict(Counter(row["word"] for row in rows))
        print(f"{len(rows)} of {len(setups)} in {seconds:.0f} s: {counts}", flush=True)
        report.parent.mkdir(parents=True, exist_ok=True)
        found = {**facts, "tolerance": TOLERANCE, "seconds": seconds, "verdicts": counts, "runs": rows}
        report.write_text(json.dumps(found, indent=1))
    return rows


def shrink_all(bad: list[tuple[Setup, Verdict]], runner: Runner, limit: int) -> None:
    """Write the smallest script of the first failing set-ups."""
    place = ROOT / "build" / "differential"
    place.mkdir(parents=True, exist_ok=True)
    crashes: set[str] = set()
    for setup, verdict in bad:
        if limit == 0 or verdict.text[:60] in crashes:
            continue
        limit -= 1
        crashes |= {verdict.text[:60]} if verdict.word == "crashed" else set()
        small, last = shrink(setup, verdict.word, runner)
        last = last or verdict
        path = place / f"case_{setup.seed}.py"
        path.write_text(script(small))
        print(f"\n{'-' * 100}\nseed {setup.seed} {last.word}: {last.text}\n{small.as_text()}\n{path}:\n")
        print(script(small), flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def pair(text: str) -> Filter:
        name, _, value = text.partition("=")
        return name, value

    parser = argparse.ArgumentParser(description="Train random set-ups on a mesh and on one process, and compare.")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first of consecutive seeds")
    parser.add_argument("--case", type=int, nargs="+", help="these seeds only, with their scripts kept")
    parser.add_argument("--only", type=pair, nargs="+", default=[], help="field=value: set-ups that have it; * is any")
    parser.add_argument("--skip", type=pair, nargs="+", default=[], help="field=value: no set-up that has it")
    parser.add_argument("--shrink", type=int, default=6, help="so many failing set-ups are shrunk, one of each crash")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a launch may take")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "differential.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Draw, run, shrink, report; returns the exit code."""
    options = parse(arguments)
    preload(PLACES)
    seeds = iter(options.case or range(options.seed, options.seed + 1000 * options.count))
    setups: list[Setup] = []
    for seed in seeds:
        setup = draw(seed)
        if options.case or wanted(setup, options.only, options.skip):
            setups.append(setup)
        if not options.case and len(setups) == options.count:
            break
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runner = Runner(Path(folder), options.timeout)
        rows = run_all(setups, runner, options.report, {"seed": options.seed, "count": len(setups)})
        for row in rows if options.case else []:
            print(f"{row['word']}: {row['difference']:.1e} {row['text']}\n{row['setup']}\n{row['trace']}")
        bad = [
            (setup, Verdict(row["word"], row["text"]))
            for setup, row in zip(setups, rows, strict=True)
            if row["word"] in ("differs", "crashed", "hung")
        ]
        shrink_all(bad, runner, options.shrink)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
