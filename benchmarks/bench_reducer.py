"""Time forward, backward and gradient reduction against torch's DDP and FSDP, on two gloo ranks with one thread each.

    python benchmarks/bench_reducer.py                     # half an hour on a quiet machine
    python benchmarks/bench_reducer.py --sizes 28          # one size, in millions of parameters
    python benchmarks/bench_reducer.py --kinds zero3       # one comparison
    python benchmarks/bench_reducer.py --smoke             # seconds; checks that everything runs, its numbers mean nothing

The same Llama with the reducer of hf_parallel (buckets leave during the backward pass, as in a Trainer), under DDP with its
defaults, under DDP as a user would tune it (`gradient_as_bucket_view`, `static_graph`), and without any exchange, which is
what one process takes for the same rows. A step of these has no update. With ZeRO 1 a step has one (AdamW): hf_parallel's
partition against `ZeroRedundancyOptimizer` under tuned DDP; with ZeRO 3, too: hf_parallel's sharded model against
`fully_shard` alone, both a block at a time. All samples are taken in changing order within one run and
compared by the median of paired ratios (see timing.py for the guard against other load).

Where the memory of a model happens to lie changes its step by some percent, for as long as the model lives. So the models
are made several times in a run, and two equal copies of the tuned DDP show how far apart two of the same kind are.
"""

from __future__ import annotations

import gc
import statistics
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
    ROUNDS_HEAD,
    Clock,
    Rounds,
    Sample,
    all_samples,
    check_agreement,
    llama_config,
    parser_of,
    quartiles,
    run_both_ranks,
    spread,
    write_report,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic
from hf_parallel.data_parallel.zero import ZeroPartition


RANKS = 2
# What is compared with what; the first rival is the one at its best.
PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "reduction": (
        *(("hf_parallel", other) for other in ("ddp_tuned", "ddp", "one")),
        ("ddp_twin", "ddp_tuned"),
    ),
    "zero1": (("hf_parallel_zero", "zero_redundancy"),),
    "zero3": (("hf_parallel_sharded", "fully_shard"),),
}
KINDS = {kind: tuple(dict.fromkeys(name for pair in pairs for name in pair)) for kind, pairs in PAIRS.items()}
SIZES = {7: (256, 6, 4096), 28: (512, 6, 8192), 99: (768, 10, 17408)}  # 1e6 parameters -> hidden, blocks, vocabulary


@dataclass(frozen=True)
class Settings:
    """Sizes of a run. `microbatches` is the number of rows on each rank, `copies` how often the models are made anew."""

    microbatches: tuple[int, ...] = (1, 4)
    rounds: int = 15
    copies: int = 3
    steps: int = 2
    kinds: tuple[str, ...] = tuple(KINDS)
    sizes: tuple[tuple[int, int, int], ...] = tuple(SIZES.values())
    length: int = 64
    bucket_mb: tuple[float, ...] = (25.0,)
    foreign: float = 0.15
    quiet_budget: float = 120.0


class Bench:
    """One rank's side: a model for each variant, all alike."""

    def __init__(self, rank: int, settings: Settings, kind: str, size: tuple[int, int, int], bucket_mb: float) -> None:
        self.settings, self.size = settings, size
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        self.models: dict[str, nn.Module] = {name: self._model() for name in KINDS[kind]}
        self.parameters = sum(p.numel() for p in self.models[KINDS[kind][0]].parameters())
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.reducers: dict[str, GradientReducer | ZeroPartition] = {}
        self.sharded: dict[str, ShardedModel] = {}
        traffic = Traffic(round(bucket_mb * 2**20), overlaps=True)
        for name, model in self.models.items():
            named = list(model.named_parameters())
            if name == "hf_parallel":
                self.reducers[name] = GradientReducer(named, dist.group.WORLD, traffic)
            elif name == "hf_parallel_zero":
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
                group = dist.group.WORLD
                if group is not None:
                    self.reducers[name] = ZeroPartition(optimizer, named, group, traffic=traffic)
                self.optimizers[name] = optimizer
            elif name in ("hf_parallel_sharded", "fully_shard"):
                self.shard(name, model)
                self.optimizers[name] = torch.optim.AdamW(model.parameters(), lr=1e-4)
            elif name != "one":
                tuned: dict[str, Any] = (
                    {} if name == "ddp" else {"gradient_as_bucket_view": True, "static_graph": True}
                )
                self.models[name] = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **tuned)
            if name == "zero_redundancy":
                self.optimizers[name] = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        torch.manual_seed(rank)
        self.ids = torch.randint(0, size[2], (max(settings.microbatches), settings.length))

    def _model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        hidden, blocks, vocab = self.size
        return LlamaForCausalLM(llama_config(hidden, blocks, vocab, self.settings.length)).train()

    def shard(self, name: str, model: nn.Module) -> None:
        """Keep a part of each parameter on each rank, by `fully_shard` alone or as hf_parallel does."""
        blocks = [f"model.layers.{block}" for block in range(self.size[1])]
        if name == "hf_parallel_sharded":
            group, device = dist.group.WORLD, torch.device("cpu")
            if group is not None:
                self.sharded[name] = ShardedModel(model, [[block] for block in blocks], group, stage=3, device=device)
            return
        mesh = init_device_mesh("cpu", (RANKS,))
        for module in (*map(model.get_submodule, blocks), model):
            fully_shard(module, mesh=mesh)

    def step(self, name: str, rows: int) -> float:
        """Take some steps; return the loss."""
        model, ids = self.models[name], self.ids[:rows]
        reducer, optimizer, sharded = self.reducers.get(name), self.optimizers.get(name), self.sharded.get(name)
        loss = torch.zeros(())
        for _ in range(self.settings.steps):
            model.zero_grad()
            if isinstance(reducer, ZeroPartition):
                reducer.zero_grad()
            if sharded is not None:
                sharded.begin_forward()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if reducer is not None:
                reducer.arm(1.0 / RANKS)
            if sharded is not None:
                sharded.begin_backward()
            loss.backward()
            if reducer is not None:
                reducer.reduce(1.0 / RANKS)
            if optimizer is not None:
                optimizer.step()
        return float(loss.detach())

    def sample(self, name: str, rows: int, number: int) -> Sample:
        """Time the steps of a variant."""
        return self.clock.sample(name, rows, number, lambda: self.step(name, rows))

    def norm(self, name: str) -> float:
        """Norm of the reduced gradients, of the parameters after updates: to prove that the variants do the same work."""
        parameters = list(self.models[name].parameters())
        tensors = [p.detach() if name in self.optimizers else p.grad for p in parameters]
        norm = torch.nn.utils.get_total_norm([tensor for tensor in tensors if tensor is not None])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def worker(rank: int, settings: Settings) -> list[dict[str, Any]]:
    """Run one rank; return the samples of each kind, size of model and size of bucket."""
    found: list[dict[str, Any]] = []
    for kind in settings.kinds:
        for size in settings.sizes:
            for bucket_mb in settings.bucket_mb:
                samples: list[Sample] = []
                for copy in range(settings.copies):
                    bench = Bench(rank, settings, kind, size, bucket_mb)
                    samples += samples_of(bench, KINDS[kind], copy)
                    parameters = bench.parameters
                    del bench
                    gc.collect()  # the models of DDP are in cycles
                found.append({
                    "kind": kind,
                    "parameters": parameters,
                    "bucket_mb": bucket_mb,
                    "samples": [asdict(sample) for sample in samples],
                })  # fmt: skip
    return found


def samples_of(bench: Bench, names: Sequence[str], copy: int) -> list[Sample]:
    """The samples of new models: their share of the rounds, once they have taken their first steps and computed the same."""
    settings = bench.settings
    for rows in settings.microbatches:
        # The first pass only watches in which order gradients come; the second is like all others.
        for _ in range(2):
            facts = {name: (bench.sample(name, rows, -1).loss, bench.norm(name)) for name in names}
        check_agreement({name: facts[name] for name in names if name != "one"}, names[1])
    first, end = (settings.rounds * at // settings.copies for at in (copy, copy + 1))
    return all_samples(names, settings.microbatches, lambda rows: end - first, bench.sample, first)


def rows_of(found: dict[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """One row for each number of rows in a batch and each rival."""
    rows, samples = [], [Sample(**sample) for sample in found["samples"]]
    for count in settings.microbatches:
        rounds = Rounds.of(samples, count, settings.foreign)
        for timed, other in PAIRS[found["kind"]]:
            ratios = rounds.paired(timed, other)
            rows.append({
                "parameters": found["parameters"],
                "bucket_mb": found["bucket_mb"],
                "rows": count,
                "timed": timed,
                "rival": other,
                "seconds": rounds.median(lambda g, n=timed: g[n].seconds) / settings.steps,
                "rival_seconds": rounds.median(lambda g, n=other: g[n].seconds) / settings.steps,
                "ratio": statistics.median(ratios),
                "quartiles": quartiles(ratios),
                "cpu_ratio": rounds.median(lambda g, n=timed, o=other: g[n].cpu / g[o].cpu),
                "foreign_cores": rounds.foreign,
                "clean": rounds.clean,
                "verdict": rounds.verdict,
            })  # fmt: skip
    return rows


NAMES = {
    "hf_parallel": "hf_parallel",
    "hf_parallel_zero": "hf_parallel, ZeRO 1",
    "ddp": "DDP",
    "ddp_tuned": "DDP, bucket views, static graph",
    "ddp_twin": "the same DDP once more",
    "one": "no exchange",
    "zero_redundancy": "the same DDP and ZeroRedundancyOptimizer",
    "hf_parallel_sharded": "hf_parallel, ZeRO 3",
    "fully_shard": "fully_shard",
}
HEAD = (
    "1e6 parameters",
    "bucket MiB",
    "rows",
    "timed",
    "against",
    "ms",
    "its ms",
    "ratio (quartiles)",
    "CPU",
    ROUNDS_HEAD,
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    return (
        *(f"{row['parameters'] / 1e6:.1f}", f"{row['bucket_mb']:g}", str(row["rows"])),
        *(NAMES[row["timed"]], NAMES[row["rival"]]),
        *(f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['rival_seconds']:.1f}"),
        *(spread(row["ratio"], row["quartiles"], 3), f"{row['cpu_ratio']:.3f}", row["verdict"]),
    )


def main() -> None:
    """Run both ranks, print the table and write the report."""
    parser = parser_of(__doc__, "build/reports/bench-reducer.json")
    parser.add_argument("--page", type=Path, help="page of results whose section is rewritten")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="1e6 parameters")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is compared")
    given = parser.parse_args()
    shared: dict[str, Any] = {
        "foreign": given.foreign,
        "quiet_budget": given.quiet_budget,
        "kinds": tuple(given.kinds),
    }
    if given.smoke:
        tiny: dict[str, Any] = {
            "sizes": ((64, 1, 64),),
            "length": 8,
            "steps": 1,
            "rounds": 2,
            "copies": 2,
            "quiet_budget": 0.0,
        }
        settings = Settings(microbatches=(1,), bucket_mb=(25.0, 0.05), **{**shared, **tiny})
    else:
        chosen = tuple(given.microbatches or Settings.microbatches)
        sizes = tuple(SIZES[size] for size in given.sizes)
        settings = Settings(microbatches=chosen, sizes=sizes, rounds=given.rounds or Settings.rounds, **shared)
    found = run_both_ranks(worker, settings)
    rows = [row for each in found for row in rows_of(each, settings)]
    title = f"Llama, {RANKS} gloo ranks with one thread each, rows of {settings.length} tokens"
    table = Table(*HEAD, title=title)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=170).print(table)
    write_report(given.output, {"settings": asdict(settings), "rows": rows, "samples": found})
    if given.page is not None:
        text = (
            f"{title}; time of forward, backward and reduction, with an update for ZeRO 1 and 3. The ratio is the median of paired "
            "ones, the load the cores that other processes used. Two equal copies of DDP differ, because their memory lies elsewhere: "
            "what is within their difference says nothing."
        )
        write_section(given.page, "reducer", f"{text}\n\n{markdown_table(HEAD, [cells(row) for row in rows])}")


if __name__ == "__main__":
    main()
