"""Time the cut for ranks of different speed against the even one and the one for equal ranks, where one rank is slowed.

    python benchmarks/bench_unequal.py            # some three minutes on a quiet machine
    python benchmarks/bench_unequal.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

Two gloo ranks with one thread each, each on a core of its own. A process that computes without end shares the core of rank 1,
which so has about half of it. The speeds are measured as `pipeline.rank_speed: auto` does.

All samples are taken in changing order within one run and compared by the median of paired ratios (see timing.py). The load
on rank 1 is not counted as foreign.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_schedules import CutBench
from rich.console import Console
from rich.table import Table
from timing import (
    ROUNDS_HEAD,
    Rounds,
    Sample,
    all_samples,
    check_agreement,
    parser_of,
    quartiles,
    run_both_ranks,
    settings_of,
    spread,
    write_report,
)
from torch import nn

from hf_parallel.engine.plan.rank_limits import products_per_s, relative_speeds


CUTS = ("even", "balanced", "by speed")
RANKS = 2
LOAD = 1.0  # cores of the process that slows rank 1


@dataclass(frozen=True)
class Settings:
    """One benchmark run; ``quiet_budget`` in seconds, ``foreign`` in cores, without the load on rank 1.

    The model has ``blocks`` blocks of ``hidden``; a microbatch is one row of ``length`` tokens.
    """

    microbatches: tuple[int, ...] = (8,)
    rounds: int = 8
    hidden: int = 256
    blocks: int = 12
    vocab: int = 4000
    length: int = 128
    quiet_budget: float = 60.0
    foreign: float = 0.15


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples, the bounds and the measured speeds."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with load(cores[1 % len(cores)]) if rank == 1 else contextlib.nullcontext():
        dist.barrier()
        found: list[float] = [0.0] * RANKS
        dist.all_gather_object(found, products_per_s(nn.Linear(1, 1), torch.device("cpu"), 2.0))
        speeds = relative_speeds(found)
        bench = CutBench(rank, settings, CUTS, settings.foreign + LOAD, speeds)
        for count in settings.microbatches:  # also warms up
            check_agreement({name: (bench.sample(name, count, -1).loss,) for name in CUTS}, "even")
        samples = all_samples(CUTS, settings.microbatches, lambda count: settings.rounds, bench.sample)
        dist.barrier()
    return {"samples": [asdict(sample) for sample in samples], "bounds": bench.bounds, "speeds": speeds}


@contextlib.contextmanager
def load(core: int) -> Iterator[None]:
    """Inside, another process computes on `core` without end, at most until this one is gone."""
    spin = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rows_of(facts: dict[str, Any], microbatches: int, foreign: float) -> list[dict[str, Any]]:
    """Return one row a cut: its step against the even cut's."""
    rounds = Rounds.of([Sample(**sample) for sample in facts["samples"]], microbatches, foreign + LOAD)
    return [
        {
            "cut": name,
            "bounds": facts["bounds"][name],
            "microbatches": microbatches,
            "seconds": statistics.median(group[name].seconds for group in rounds.used),
            "over_even": statistics.median(rounds.paired(name, "even")),
            "quartiles": quartiles(rounds.paired(name, "even")),
            "over_balanced": statistics.median(rounds.paired(name, "balanced")),
            "rounds_used": len(rounds.used),
            "clean": rounds.clean,
            "verdict": rounds.verdict,
        }
        for name in CUTS
    ]  # fmt: skip


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table."""
    table = Table(title=title)
    for name in ("m", "cut", "bounds", "step s", "/ even", "/ balanced", ROUNDS_HEAD):
        table.add_column(name, justify="left" if name in ("cut", "bounds") else "right")
    for row in rows:
        table.add_row(
            *(str(row["microbatches"]), row["cut"], str(row["bounds"]), f"{row['seconds']:.3f}"),
            *(spread(row["over_even"], row["quartiles"], 3), f"{row['over_balanced']:.3f}", row["verdict"]),
        )
    return table


def parse_arguments() -> tuple[Settings, Path]:
    """Return the settings and the report's path."""
    given = parser_of(__doc__, "build/reports/bench-unequal.json").parse_args()
    tiny = {"hidden": 32, "blocks": 5, "vocab": 100, "length": 16}
    return settings_of(Settings, given, **tiny), given.output


def main() -> None:
    """Run both ranks, print the table and write the report."""
    settings, output = parse_arguments()
    facts = run_both_ranks(worker, settings)
    rows = [row for count in settings.microbatches for row in rows_of(facts, count, settings.foreign)]
    speeds = ", ".join(f"{speed:.2f}" for speed in facts["speeds"])
    title = f"Llama, {settings.blocks} blocks of {settings.hidden}, 1F1B; measured speeds of the ranks: {speeds}"
    Console(width=140).print(table_of(rows, title))
    write_report(output, {"settings": asdict(settings), "rows": rows, **facts})


if __name__ == "__main__":
    main()
