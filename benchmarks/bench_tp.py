"""Time tensor parallelism against transformers' own and against one process, and weigh the logits.

    python benchmarks/bench_tp.py            # some minutes on a quiet machine
    python benchmarks/bench_tp.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

Speed: a Llama of each size trains on two gloo ranks with one thread each; a step is forward, backward and AdamW. ``native``
is transformers' tensor parallelism, applied to an instantiated model; ``one`` is the same model in one process with one
thread while the other rank waits. Step time is from one barrier to the next, CPU time is that of both ranks together. Loss
and gradient norm of the variants are compared before anything is timed. Samples are taken in changing order within one
run and compared by the median of paired ratios (see timing.py for the guard against other load). The models are made
several times in a run, because a step also depends on where their memory lies.

Memory: a dispatch mode follows every storage that an operation of one training step returns, from its creation until it
is freed, forward and backward. Counted are tensors whose last dim is the vocabulary, or this rank's part of it: logits,
their fp32 copies, probabilities, their gradients; not the head's weight and its gradient. The figure is the most bytes
of them alive at once. What a kernel allocates and frees inside one operation is not seen.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from timing import (
    ROUNDS_HEAD,
    Clock,
    Rounds,
    Sample,
    all_samples,
    check_agreement,
    parser_of,
    quartiles,
    run_both_ranks,
    spread,
    write_report,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.shard_plan import TPPlan


VARIANTS = ("hf_parallel", "native", "one")
RANKS = 2


@dataclass(frozen=True)
class Size:
    """A Llama and its batch of ``rows`` x ``length`` tokens."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocab: int
    rows: int
    length: int

    @property
    def title(self) -> str:
        """What the tables call it."""
        return (
            f"{self.name}: hidden {self.hidden}, {self.layers} layers, vocabulary {self.vocab}, "
            f"{self.rows} x {self.length} tokens"
        )


TINY = Size("tiny", 64, 4, 4, 8192, 2, 16)
MEDIUM = Size("medium", 512, 6, 8, 32000, 1, 128)
# The more tokens, the smaller the share of what is compared. Not as many as the model is wide: see LiveLogits.
LONGER = Size("longer", 512, 6, 8, 32000, 4, 120)
SMOKE = Size("smoke", 32, 2, 4, 96, 2, 8)


@dataclass(frozen=True)
class Settings:
    """One benchmark run.

    ``quiet_budget`` in seconds for each set of models, ``foreign`` in cores, ``copies``: how often the models are made anew.
    """

    sizes: tuple[Size, ...] = (TINY, MEDIUM, LONGER)
    rounds: int = 15
    copies: int = 3
    quiet_budget: float = 120.0
    foreign: float = 0.15


def build_model(size: Size, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The same weights on every rank and in every call."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        vocab_size=size.vocab,
        max_position_embeddings=size.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).train()


def build_batch(size: Size) -> dict[str, Tensor]:
    """One batch, the same on every rank."""
    ids = torch.randint(0, size.vocab, (size.rows, size.length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def shard(model: nn.Module, rank: int) -> TPPlan:
    """Apply hf_parallel's plan in place, as the Trainer does; the plan is that of rank 0."""
    ids = torch.arange(15).reshape(3, 5) % model.config.vocab_size
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plan = shard_vocabulary(model, plan_tensor_parallel(model, RANKS, sample), sample)
    apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: True)
    return plan


def shard_natively(model: Any) -> None:
    """Apply transformers' own plan in place."""
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=RANKS))
    apply_tensor_parallelism(model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))["tp"], plan)


class SpeedBench:
    """One rank's side of the speed of one size: the same Llama three times."""

    def __init__(self, rank: int, size: Size, settings: Settings) -> None:
        self.rank = rank
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        self.batch = build_batch(size)
        self.models = {name: build_model(size) for name in VARIANTS if name != "one" or rank == 0}
        self.specs = shard(self.models["hf_parallel"], rank).shard_specs()
        shard_natively(self.models["native"])
        self.optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in self.models.items()}

    def step(self, name: str) -> float | None:
        """One training step; None on a rank without a part in it."""
        if name not in self.models:
            return None
        self.optimizers[name].zero_grad()
        loss = self.models[name](**self.batch).loss
        loss.backward()
        self.optimizers[name].step()
        return float(loss.detach())

    def sample(self, name: str, count: int, number: int) -> Sample:
        """Time one step of a variant."""
        return self.clock.sample(name, count, number, lambda: self.step(name))

    def gradient_norm(self, name: str) -> float:
        """The norm of the gradient that the last step left, over the ranks where they share it."""
        if name != "hf_parallel":
            grads = [p.grad for p in self.models[name].parameters()] if name in self.models else []
            whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
            total = torch.stack([grad.square().sum() for grad in whole]).sum() if whole else torch.zeros(())
            return float(total.sqrt())
        total = torch.zeros(())
        for key, parameter in self.models[name].named_parameters():
            if parameter.grad is not None and (key in self.specs or self.rank == 0):
                total += parameter.grad.square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())


class LiveLogits(TorchDispatchMode):
    """Counts the bytes of live tensors whose last dim is ``width``.

    Other than those of ``excluded`` elements: the head's weight and its gradient.
    """

    def __init__(self, width: int, excluded: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width, self.excluded = width, excluded
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages that it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.width:
                self.note(tensor)
        return result

    def note(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if tensor.numel() == self.excluded or id(storage) in self.known:
            return
        key, size = id(storage), storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def logits_bytes(size: Size, dtype: torch.dtype, rank: int | None) -> int:
    """Most bytes of logits alive at once in a training step, of one rank or (None) of the plain model."""
    model = build_model(size, dtype)
    if rank is not None:
        shard(model, rank)
    head = model.lm_head._parameters["weight"]  # this rank's part: read as an attribute, it has the shape of the whole
    with LiveLogits(head.shape[0], head.numel()) as mode:
        model(**build_batch(size)).loss.backward()
    if not mode.peak:
        raise RuntimeError(
            f"{size.name}: no tensor of {head.shape[0]} logits a token was seen; the count sees nothing"
        )
    return mode.peak


def samples_of(copy: int, rank: int, size: Size, settings: Settings) -> list[Sample]:
    """The samples of new models: their share of the rounds, once they have taken a first step and computed the same."""
    bench = SpeedBench(rank, size, settings)
    found: dict[str, tuple[float | None, ...]] = {}
    for name in VARIANTS:
        loss = bench.sample(name, 1, -1).loss
        found[name] = (loss, bench.gradient_norm(name) if name in bench.models else None)
    check_agreement(found, "hf_parallel")
    first, end = (settings.rounds * at // settings.copies for at in (copy, copy + 1))
    return all_samples(VARIANTS, (1,), lambda count: end - first, bench.sample, first)


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples of every size and the bytes of logits."""
    facts: dict[str, Any] = {"samples": {}, "memory": []}
    for size in settings.sizes:
        samples = [sample for copy in range(settings.copies) for sample in samples_of(copy, rank, size, settings)]
        facts["samples"][size.name] = [asdict(sample) for sample in samples]
    for size in settings.sizes:
        for dtype in (torch.float32, torch.bfloat16):
            local: list[Any] = [None] * RANKS
            dist.all_gather_object(local, logits_bytes(size, dtype, rank))
            whole = logits_bytes(size, dtype, None)
            facts["memory"].append({"size": size.name, "dtype": str(dtype), "one": whole, "ranks": local})
    return facts


def speed_rows(samples: Sequence[Sample], size: Size, foreign: float) -> list[dict[str, Any]]:
    """One row a variant: its step and CPU time, and hf_parallel's in proportion to it."""
    rounds = Rounds.of(samples, 1, foreign)

    return [
        {
            "size": size.name,
            "variant": name,
            "seconds": statistics.median(group[name].seconds for group in rounds.used),
            "cpu": statistics.median(group[name].cpu for group in rounds.used),
            "step_ratio": statistics.median(rounds.paired("hf_parallel", name)),
            "quartiles": quartiles(rounds.paired("hf_parallel", name)),
            "cpu_ratio": rounds.median(lambda group, name=name: group["hf_parallel"].cpu / group[name].cpu),
            "rounds_used": len(rounds.used),
            "clean": rounds.clean,
            "foreign_cores": rounds.foreign,
            "verdict": rounds.verdict,
        }
        for name in VARIANTS
    ]  # fmt: skip


def speed_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The speed of one size as a table."""
    table = Table(title=title)
    for name in ("variant", "step ms", "CPU ms", "hf_parallel / it: step (quartiles)", "CPU", ROUNDS_HEAD):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for row in rows:
        times = (f"{1000 * row['seconds']:.1f}", f"{1000 * row['cpu']:.1f}")
        ratio = spread(row["step_ratio"], row["quartiles"], 3)
        table.add_row(row["variant"], *times, ratio, f"{row['cpu_ratio']:.3f}", row["verdict"])
    return table


def memory_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The bytes of logits as a table."""
    table = Table(title="most bytes of logits alive at once, forward and backward")
    for name in ("model", "dtype", "one process MB", "each of 2 ranks MB", "ratio"):
        table.add_column(name, justify="left" if name in ("model", "dtype") else "right")
    for row in rows:
        ranks = " ".join(f"{value / 1e6:.2f}" for value in row["ranks"])
        ratio = f"{max(row['ranks']) / row['one']:.3f}"
        table.add_row(row["size"], row["dtype"].removeprefix("torch."), f"{row['one'] / 1e6:.2f}", ranks, ratio)
    return table


def parse_arguments() -> tuple[Settings, Path]:
    """Return the settings and the report's path."""
    parser = parser_of(__doc__, "build/reports/bench-tp.json")
    known = {size.name: size for size in (*Settings.sizes, SMOKE)}
    parser.add_argument("--sizes", nargs="+", choices=list(known), default=[size.name for size in Settings.sizes])
    given = parser.parse_args()
    if given.smoke:
        return Settings((SMOKE,), 2, 1, 0.0, given.foreign), given.output
    sizes = tuple(known[name] for name in given.sizes)
    rounds = given.rounds or Settings.rounds
    return Settings(sizes, rounds, quiet_budget=given.quiet_budget, foreign=given.foreign), given.output


def main() -> None:
    """Run both ranks, print the tables and write the report."""
    settings, output = parse_arguments()
    facts = run_both_ranks(worker, settings)
    console, rows = Console(width=120), []
    for size in settings.sizes:
        samples = [Sample(**sample) for sample in facts["samples"][size.name]]
        found = speed_rows(samples, size, settings.foreign)
        console.print(speed_table(found, size.title))
        rows += found
    console.print(memory_table(facts["memory"]))
    report = {"settings": asdict(settings), "speed": rows, "memory": facts["memory"], "samples": facts["samples"]}
    write_report(output, report)


if __name__ == "__main__":
    main()
