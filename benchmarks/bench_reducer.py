"""Time forward, backward and gradient reduction against torch's DDP, on two gloo ranks with one thread each.

    python benchmarks/bench_reducer.py            # a few minutes on a quiet machine
    python benchmarks/bench_reducer.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

The same Llama with the reducer of hf_parallel (buckets leave during the backward pass, as in a Trainer), under DDP with its
defaults, and without any exchange, which is what one process takes for the same rows. All samples are taken in rotating
order within one run and compared by the median of paired ratios (see timing.py for the guard against other load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results_page import markdown_table, write_section
from rich.console import Console
from rich.table import Table
from timing import (
    Clock,
    Rounds,
    Sample,
    all_samples,
    check_agreement,
    llama_config,
    parser_of,
    run_both_ranks,
    write_report,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic


RANKS = 2
VARIANTS = ("hf_parallel", "ddp", "one")


@dataclass(frozen=True)
class Settings:
    """Sizes of a run. `microbatches` is the number of rows on each rank."""

    microbatches: tuple[int, ...] = (1, 4)
    rounds: int = 25
    steps: int = 3
    hidden: int = 256
    blocks: int = 6
    vocab: int = 4096
    length: int = 64
    bucket_mb: tuple[float, ...] = (25.0, 4.0)
    foreign: float = 0.15
    quiet_budget: float = 120.0


class Bench:
    """One rank's side: a model for each variant, all alike."""

    def __init__(self, rank: int, settings: Settings, bucket_mb: float) -> None:
        self.settings = settings
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        self.models: dict[str, nn.Module] = {name: self._model() for name in VARIANTS}
        self.parameters = sum(p.numel() for p in self.models["one"].parameters())
        named = list(self.models["hf_parallel"].named_parameters())
        self.reducer = GradientReducer(named, dist.group.WORLD, Traffic(round(bucket_mb * 2**20), overlaps=True))
        self.models["ddp"] = DistributedDataParallel(self.models["ddp"], bucket_cap_mb=bucket_mb)
        rows = max(settings.microbatches)
        torch.manual_seed(rank)
        self.ids = torch.randint(0, settings.vocab, (rows, settings.length))

    def _model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        settings = self.settings
        config = llama_config(settings.hidden, settings.blocks, settings.vocab, settings.length)
        return LlamaForCausalLM(config).train()

    def step(self, name: str, rows: int) -> float:
        """Take some steps without an update; return the loss."""
        model, ids = self.models[name], self.ids[:rows]
        loss = torch.zeros(())
        for _ in range(self.settings.steps):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if name == "hf_parallel":
                self.reducer.arm(1.0 / RANKS)
            loss.backward()
            if name == "hf_parallel":
                self.reducer.reduce(1.0 / RANKS)
        return float(loss.detach())

    def sample(self, name: str, rows: int, number: int) -> Sample:
        """Time the steps of a variant."""
        return self.clock.sample(name, rows, number, lambda: self.step(name, rows))

    def gradient_norm(self, name: str) -> float:
        """Norm of the reduced gradients, to prove that the variants do the same work."""
        return float(
            torch.nn.utils.get_total_norm([p.grad for p in self.models[name].parameters() if p.grad is not None])
        )


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples by size of bucket."""
    found: dict[str, Any] = {}
    for bucket_mb in settings.bucket_mb:
        bench = Bench(rank, settings, bucket_mb)
        for rows in settings.microbatches:
            # The first pass only watches in which order gradients come; the second is like all others.
            for _ in range(2):
                facts = {n: (bench.sample(n, rows, -1).loss, bench.gradient_norm(n)) for n in VARIANTS}
            check_agreement({name: facts[name] for name in ("hf_parallel", "ddp")}, "ddp")
        samples = all_samples(VARIANTS, settings.microbatches, lambda rows: settings.rounds, bench.sample)
        bench.reducer.close()
        found[str(bucket_mb)] = [asdict(sample) for sample in samples]
        found["parameters"] = bench.parameters
    return found


def rows_of(samples: Sequence[Sample], bucket_mb: str, settings: Settings) -> list[dict[str, Any]]:
    """One row for each number of rows in a batch."""
    found = []
    for count in settings.microbatches:
        rounds = Rounds.of(samples, count, settings.foreign)
        ratios = sorted(group["hf_parallel"].seconds / group["ddp"].seconds for group in rounds.used)
        found.append({
            "bucket_mb": float(bucket_mb),
            "rows": count,
            "seconds": {name: rounds.median(lambda g, n=name: g[n].seconds) / settings.steps for name in VARIANTS},
            "cpu": {name: rounds.median(lambda g, n=name: g[n].cpu) / settings.steps for name in VARIANTS},
            "over_ddp": rounds.median(lambda group: group["hf_parallel"].seconds / group["ddp"].seconds),
            "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
            "cpu_over_ddp": rounds.median(lambda group: group["hf_parallel"].cpu / group["ddp"].cpu),
            "over_one": rounds.median(lambda group: group["hf_parallel"].seconds / group["one"].seconds),
            "ddp_over_one": rounds.median(lambda group: group["ddp"].seconds / group["one"].seconds),
            "foreign_cores": rounds.foreign,
            "clean": rounds.clean,
            "verdict": rounds.verdict,
        })  # fmt: skip
    return found


HEAD = (
    "bucket MiB",
    "rows",
    "hf_parallel ms",
    "DDP ms",
    "no exchange ms",
    "/ DDP (quartiles)",
    "CPU / DDP",
    "rounds",
    "load",
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    low, high = row["quartiles"]
    return (
        f"{row['bucket_mb']:g}",
        str(row["rows"]),
        *(f"{1e3 * row['seconds'][name]:.1f}" for name in VARIANTS),
        f"{row['over_ddp']:.3f} ({low:.3f} .. {high:.3f})",
        f"{row['cpu_over_ddp']:.3f}",
        row["verdict"],
        f"{row['foreign_cores']:.2f}",
    )


def main() -> None:
    """Run both ranks, print the table and write the report."""
    parser = parser_of(__doc__, "build/reports/bench-reducer.json")
    parser.add_argument("--page", type=Path, help="page of results whose section is rewritten")
    given = parser.parse_args()
    shared: dict[str, Any] = {"foreign": given.foreign, "quiet_budget": given.quiet_budget}
    if given.smoke:
        tiny = {"hidden": 64, "blocks": 1, "vocab": 64, "length": 8, "steps": 1, "rounds": 2, "quiet_budget": 0.0}
        settings = Settings(microbatches=(1,), bucket_mb=(25.0, 0.05), **{**shared, **tiny})
    else:
        chosen = tuple(given.microbatches or Settings.microbatches)
        settings = Settings(microbatches=chosen, rounds=given.rounds or Settings.rounds, **shared)
    found = run_both_ranks(worker, settings)
    rows = []
    for size in map(str, settings.bucket_mb):
        rows += rows_of([Sample(**sample) for sample in found[size]], size, settings)
    title = (
        f"Llama of {found['parameters'] / 1e6:.1f}M parameters, {RANKS} gloo ranks, rows of {settings.length} tokens"
    )
    table = Table(*HEAD, title=title)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=140).print(table)
    write_report(given.output, {"settings": asdict(settings), "rows": rows, "samples": found})
    if given.page is not None:
        text = (
            f"{title}; time of forward, backward and reduction. `/ DDP` is the median of paired ratios, `load` the cores that "
            "other processes used."
        )
        write_section(given.page, "reducer", f"{text}\n\n{markdown_table(HEAD, [cells(row) for row in rows])}")


if __name__ == "__main__":
    main()
