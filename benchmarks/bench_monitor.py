"""Time what the monitor costs a training step, on two gloo ranks with one thread each.

    python benchmarks/bench_monitor.py            # some minutes on a quiet machine
    python benchmarks/bench_monitor.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

The steps of bench_guards.py, with the monitor on, metrics gathered every ten steps, and off. Samples are taken in changing order
and compared by the median of paired ratios. Since half a percent is less than one sample scatters, the time inside of the monitor
is also measured by itself: the ends of steps as they are, and every span by what ten thousand of them take.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench_guards
from bench_guards import MICROBATCHES, Bench, Settings, measured
from rich.console import Console
from rich.table import Table
from timing import ROUNDS_HEAD, Rounds, Sample, parser_of, quartiles, run_both_ranks, spread, write_report

from hf_parallel.monitor.recorder import Recorder
from hf_parallel.monitor.report.monitor import EVERY, Monitor


VARIANTS = ("monitored", "bare")
SPANS = 10_000


class Switch:
    """Turns the recorder of a bench on and off."""

    def __init__(self) -> None:
        self.bench: MonitorBench | None = None

    def set(self, variant: str) -> None:
        """Record, or do not."""
        if self.bench is not None:
            self.bench.records = variant == "monitored"
            self.bench.recorder.mark = time.perf_counter if self.bench.records else lambda: None

    def spent(self) -> tuple[float, float]:
        """Nothing is timed here."""
        return 0.0, 0.0


class MonitorBench(Bench):
    """A layout whose steps are measured, or not."""

    def __init__(self, rank: int, settings: Settings, layout: str, switch: Any) -> None:
        super().__init__(rank, settings, layout, switch)
        session: Any = self.accelerator.hf_parallel  # type: ignore[attr-defined]
        self.monitor = Monitor(session.engine, session.config, session.schedule, Path("build"))
        self.recorder: Recorder = session.engine.recorder
        self.number, self.records = 0, True
        self.reset()
        switch.bench = self

    def step(self) -> float:
        """One optimizer step."""
        if not self.records:
            return super().step()
        begun = time.perf_counter()
        self.number += 1
        self.monitor.begin_step(self.number)
        self.monitor.read(self.batches)
        before = time.perf_counter()
        loss = super().step()
        after = time.perf_counter()
        self.monitor.end_step(self.number, logs=self.number % EVERY == 0)
        self.ends_s += before - begun + time.perf_counter() - after
        last = self.monitor._last
        self.spans += len(last.spans) if last is not None else 0
        self.measured += 1
        return loss

    def reset(self) -> None:
        """Forget what was measured while it warmed up."""
        self.ends_s, self.spans, self.measured = 0.0, 0, 0

    def facts(self) -> dict[str, float]:
        """Of a step: seconds at its ends, its spans, and what they take."""
        recorder = Recorder(self.accelerator.device)
        recorder.begin_step(1)
        start = time.perf_counter()
        for _ in range(SPANS):
            recorder.add("F", 0, 0, recorder.mark())
        a_span = (time.perf_counter() - start) / SPANS
        steps = max(1, self.measured)
        return {"ends_s": self.ends_s / steps, "spans": self.spans / steps, "span_s": a_span}


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank."""
    return measured(rank, settings, MonitorBench, Switch(), VARIANTS)


def row_of(layout: str, found: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What the samples of a layout say."""
    rounds = Rounds.of([Sample(**sample) for sample in found["samples"]], MICROBATCHES, settings.foreign)
    ratios = rounds.paired("monitored", "bare")
    seconds = rounds.median(lambda group: group["bare"].seconds) / settings.steps
    inside = found["ends_s"] + found["spans"] * found["span_s"]
    return {
        "layout": layout,
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "quartiles": quartiles(ratios),
        "spans": found["spans"],
        "inside_s": inside,
        "inside_share": inside / seconds,
        "verdict": rounds.verdict,
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    ratio, inside = spread(row["ratio"], row["quartiles"], 4), f"{1e3 * row['inside_s']:.3f}"
    share = f"{100 * row['inside_share']:.3f}"
    return row["layout"], f"{1e3 * row['seconds']:.0f}", ratio, f"{row['spans']:.0f}", inside, share, row["verdict"]


def main() -> None:
    """Run both ranks, print the table and write the report."""
    parser = parser_of(__doc__, "build/reports/bench-monitor.json")
    parser.add_argument("--layouts", nargs="+", choices=list(bench_guards.LAYOUTS), default=None)
    given = parser.parse_args()
    layouts = tuple(given.layouts or bench_guards.LAYOUTS)
    settings = Settings(layouts=layouts, foreign=given.foreign, quiet_budget=given.quiet_budget)
    if given.smoke:
        settings = replace(settings, hidden=64, blocks=2, vocab=64, length=8, rounds=2, quiet_budget=0.0)
    elif given.rounds:
        settings = replace(settings, rounds=given.rounds)
    found = run_both_ranks(worker, settings)
    rows = [row_of(layout, found[layout], settings) for layout in layouts]
    head = ("layout", "step ms", "monitored / bare (quartiles)", "spans", "inside ms", "inside %", ROUNDS_HEAD)
    table = Table(*head, title=f"2 gloo ranks, {MICROBATCHES} x {settings.length} tokens")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=140).print(table)
    write_report(given.output, {"settings": asdict(settings), "rows": rows, "samples": found})


if __name__ == "__main__":
    main()
