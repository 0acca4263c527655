"""What the benchmarks share: two gloo ranks with one thread each, a guarded clock, and medians over paired rounds.

Each sample records how much CPU other processes used meanwhile. A round with a sample of more than ``foreign`` cores of it
is unclean and left out where at least three clean ones remain; otherwise all are used and the result says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import psutil
import torch
import torch.distributed as dist


T = TypeVar("T")


if TYPE_CHECKING:
    from transformers import LlamaConfig


Spans: TypeAlias = dict[str, list[float]]
ENOUGH_ROUNDS = 3
ROUNDS_HEAD = "rounds, load"  # of the column that shows `Rounds.verdict`
TOLERANCE = 1e-4  # relative, of what variants of one computation give


def llama_config(hidden: int, blocks: int, vocab: int, length: int) -> LlamaConfig:
    """A Llama of the shape that the benchmarks train, with heads of 64 where the width allows two."""
    from transformers import LlamaConfig  # ranks that train no Llama start without it

    heads = max(2, hidden // 64)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=length,
    )


@dataclass
class Sample:
    """One timed step of one variant; ``spans`` holds, for each rank, the seconds of its actions.

    ``cpu`` is the CPU time of both ranks together, in seconds.
    """

    variant: str
    microbatches: int
    round: int
    seconds: float
    foreign: float
    loss: float
    spans: list[Spans] = field(default_factory=list)
    cpu: float = 0.0


class Clock:
    """One rank's side of the clock.

    Args:
        rank: 0 or 1.
        foreign: Cores of other load that a clean sample allows.
        quiet_budget: Seconds in all to wait for quiet.
    """

    def __init__(self, rank: int, foreign: float, quiet_budget: float) -> None:
        self.rank, self.foreign, self.patience = rank, foreign, quiet_budget
        self.spans: Spans = {}

    def trace(self, name: str, wall: float, cpu: float) -> None:
        """Note an action or a wait of the runtime; waits go by their first word."""
        self.spans.setdefault(name.split()[0], []).append(wall)

    def sample(self, variant: str, microbatches: int, number: int, step: Callable[[], float | None]) -> Sample:
        """Time one step, from one barrier to the next, once the machine is quiet; both ranks call it.

        Args:
            variant: Name of what is timed.
            microbatches: Microbatches of the step.
            number: Of the round.
            step: Returns the loss, or None on a rank that does not know it.
        """
        opened = self.begin()
        return self.end(opened, variant, microbatches, number, step())

    def begin(self) -> Load:
        """A step begins, once the machine is quiet; both ranks call it."""
        self.spans.clear()
        if self.rank == 0:
            self.patience -= wait_for_quiet(self.patience, self.foreign)
        dist.barrier()
        return Load()

    def end(self, opened: Load, variant: str, microbatches: int, number: int, loss: float | None) -> Sample:
        """The step of `begin` is over; both ranks call it."""
        dist.barrier()
        seconds, mine, total = opened.spent()
        facts: list[Any] = [None, None]
        dist.all_gather_object(facts, (mine, loss, {name: list(spans) for name, spans in self.spans.items()}))
        used = facts[0][0] + facts[1][0]
        foreign = foreign_cores(seconds, used, total)
        value = next(value for _, value, _ in facts if value is not None)
        return Sample(variant, microbatches, number, seconds, foreign, value, [spans for _, _, spans in facts], used)


def busy_seconds() -> float:
    """Return the CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def wait_for_quiet(limit: float, foreign: float) -> float:
    """Return when the machine uses less than ``foreign`` cores, or after ``limit`` seconds; the seconds waited."""
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if psutil.cpu_percent(interval=0.3) / 100.0 * (psutil.cpu_count() or 1) < foreign:
            break
    return time.monotonic() - start


class Load:
    """What this process and the machine use from its making on."""

    def __init__(self) -> None:
        self.busy, self.own, self.start = busy_seconds(), time.process_time(), time.perf_counter()

    def spent(self) -> tuple[float, float, float]:
        """Seconds until now, and CPU seconds of this process and of all processes."""
        seconds, own = time.perf_counter() - self.start, time.process_time() - self.own
        return seconds, own, busy_seconds() - self.busy


def foreign_cores(seconds: float, own: float, busy: float) -> float:
    """Return the cores that other processes used for some seconds, from CPU seconds of these and of all processes."""
    return max(0.0, busy - own) / seconds


def rounds_and_load(row: Mapping[str, Any]) -> str:
    """The column `ROUNDS_HEAD` of a bench that leaves no rounds out."""
    return f"{row['rounds']}, {row['foreign_cores']:.2f}"


def paired_times(
    both: Sequence[Callable[[], object]], rounds: int, calls: int = 1, warmup: int = 0
) -> list[tuple[float, float]]:
    """Seconds of a call of each of two functions, round by round; which comes first changes."""
    times: list[tuple[float, float]] = []
    for number in range(rounds + warmup):
        found = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            begin = time.perf_counter()
            for _ in range(calls):
                both[which]()
            found[which] = (time.perf_counter() - begin) / calls
        times.append((found[0], found[1]))
    return times[warmup:]


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the values between which the middle half lies."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


def spread(value: float, around: Sequence[float], digits: int = 2) -> str:
    """A median with its quartiles, as text."""
    low, high = around
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def shuffled(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round: by chance, alike on all ranks, and in the next round the other way.

    What ran just before changes a step, by memory and caches: an order that only starts elsewhere keeps the neighbours.
    """
    order = random.Random(number // 2).sample(names, len(names))
    return order[::-1] if number % 2 else order


def all_samples(
    variants: Sequence[str],
    microbatches: Sequence[int],
    rounds: Callable[[int], int],
    sample: Callable[[str, int, int], Sample],
    first: int = 0,
) -> list[Sample]:
    """Return one sample of every variant, number of microbatches and round, numbered from `first`; each round has its order."""
    return [
        sample(variant, count, first + number)
        for number in range(max(map(rounds, microbatches)))
        for count in microbatches
        if number < rounds(count)
        for variant in shuffled(variants, first + number)
    ]


def check_agreement(facts: dict[str, tuple[float | None, ...]], reference: str) -> None:
    """Compare what the variants computed (loss, gradient norm) with one of them.

    Raises:
        RuntimeError: If two variants differ: their times would then compare nothing.
    """
    for variant, values in facts.items():
        for value, other in zip(values, facts[reference], strict=True):
            if value is not None and other is not None and abs(value - other) > TOLERANCE * abs(other):
                raise RuntimeError(f"variant {variant} gives {values} and {reference} {facts[reference]}.")


@dataclass(frozen=True)
class Rounds:
    """The rounds of one number of microbatches that count, and whether all of them are clean."""

    used: list[dict[str, Sample]]
    clean: bool

    @classmethod
    def of(cls, samples: Sequence[Sample], microbatches: int, foreign: float) -> Rounds:
        """Group the samples by round and leave unclean rounds out, if enough clean ones remain."""
        here = [sample for sample in samples if sample.microbatches == microbatches]
        rounds = {number: {s.variant: s for s in here if s.round == number} for number in {s.round for s in here}}
        clean = [group for group in rounds.values() if all(sample.foreign < foreign for sample in group.values())]
        enough = len(clean) >= ENOUGH_ROUNDS
        return cls(clean if enough else list(rounds.values()), enough)

    def median(self, value: Callable[[dict[str, Sample]], float]) -> float:
        """Return the median over the rounds."""
        return statistics.median(value(group) for group in self.used)

    def paired(self, timed: str, other: str) -> list[float]:
        """The seconds of one variant in those of another, round by round."""
        return [group[timed].seconds / group[other].seconds for group in self.used]

    @property
    def foreign(self) -> float:
        """Cores that other processes used in the worst sample of a round, median over the rounds."""
        return self.median(lambda group: max(sample.foreign for sample in group.values()))

    @property
    def verdict(self) -> str:
        """Number of rounds, whether they are clean, and the load of other processes in cores."""
        return f"{len(self.used)} {'clean' if self.clean else 'UNCLEAN'}, {self.foreign:.2f}"


def run_both_ranks(worker: Callable[[int, Any], Any], settings: Any) -> Any:
    """Run ``worker(rank, settings)`` in two processes of a gloo group; return what rank 0 returned, from JSON.

    They are forked from a server that has imported the benchmark, and nothing of this process.

    Raises:
        SystemExit: If one of them failed; its traceback is on stderr.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, worker, settings, folder), daemon=True) for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"ranks exited with {[process.exitcode for process in processes]}")
        return json.loads((Path(folder) / "result.json").read_text())


def _rank_main(rank: int, worker: Callable[[int, Any], Any], settings: Any, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = worker(rank, settings)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report with the versions and the machine that it is from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"torch": torch.__version__, "cores": psutil.cpu_count(), **report}, indent=2) + "\n")


def parser_of(description: str | None, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, two rounds: seconds")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of paired samples")
    parser.add_argument("--microbatches", type=int, nargs="+", default=None)
    parser.add_argument("--foreign", type=float, default=0.15, help="cores of other load a clean sample allows")
    parser.add_argument("--quiet-budget", type=float, default=120.0, help="seconds in all to wait for quiet")
    parser.add_argument("--output", type=Path, default=Path(output))
    return parser


def settings_of(kind: Callable[..., T], given: argparse.Namespace, **tiny: int) -> T:
    """The settings of a benchmark that were given on the command line.

    Args:
        kind: A dataclass with `microbatches`, `rounds`, `quiet_budget` and `foreign`; what was not given keeps its default.
        given: Of `parser_of`.
        tiny: What makes it small, with `--smoke`.
    """
    if given.smoke:
        return kind(microbatches=(4,), rounds=2, quiet_budget=0.0, foreign=given.foreign, **tiny)
    chosen = {"microbatches": tuple(given.microbatches or ()), "rounds": given.rounds}
    return kind(
        quiet_budget=given.quiet_budget,
        foreign=given.foreign,
        **{name: value for name, value in chosen.items() if value},
    )
