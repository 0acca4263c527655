"""Time our 1F1B runtime against torch's Schedule1F1B and against one process, on two gloo ranks with one thread each.

    python benchmarks/bench_pipeline.py            # about five minutes on a quiet machine
    python benchmarks/bench_pipeline.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

The three variants run the same stage modules on the same batch, interleaved in rotating order within one run, and are
compared by the median of paired ratios. Each sample records how much CPU other processes used meanwhile: a sample with
more than ``--foreign`` cores of it is unclean and left out where enough clean ones remain. The bar to beat is not 2m / (m + 1)
but the makespan of the schedule at the stage times measured in the same run, because an uneven cut costs more than any
message does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.pipeline_parallel.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.schedules import one_f_one_b
from hf_parallel.pipeline_parallel.simulate import simulate
from hf_parallel.pipeline_parallel.transport import make_transport


VARIANTS = ("ours", "torch", "single")
CPU = torch.device("cpu")
Spans: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True)
class Settings:
    """One benchmark run; sizes in tokens and blocks, ``quiet_budget`` in seconds, ``foreign`` in cores."""

    microbatches: tuple[int, ...] = (4, 8, 16)
    rounds: int = 8
    hidden: int = 512
    blocks: int = 8
    cut: int = 4
    vocab: int = 2048
    rows: int = 1
    length: int = 128
    quiet_budget: float = 120.0
    foreign: float = 0.15

    def rounds_of(self, microbatches: int) -> int:
        """Rounds for one number of microbatches: up to three times as many where a step is short and noise is large."""
        return self.rounds * min(3, max(1, max(self.microbatches) // microbatches))

    def config(self) -> LlamaConfig:
        """Return the model: Llama-shaped, 28M parameters at the default sizes."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.blocks,
            num_attention_heads=max(2, self.hidden // 64),
            num_key_value_heads=max(2, self.hidden // 64),
            vocab_size=self.vocab,
            max_position_embeddings=self.length,
            tie_word_embeddings=False,
        )


@dataclass
class Sample:
    """One timed step of one variant."""

    variant: str
    microbatches: int
    round: int
    seconds: float
    foreign: float
    loss: float
    spans: list[Spans] = field(default_factory=list)


class FirstStage(nn.Module):
    """Embedding and the blocks before the cut."""

    def __init__(self, model: LlamaForCausalLM, cut: int) -> None:
        super().__init__()
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb
        self.blocks = model.model.layers[:cut]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states, shape (rows, length, hidden)."""
        return run_blocks(self.blocks, self.rotary, self.embed(ids))


class LastStage(nn.Module):
    """The blocks behind the cut, the final norm and the head."""

    def __init__(self, model: LlamaForCausalLM, cut: int) -> None:
        super().__init__()
        self.rotary, self.norm, self.head = model.model.rotary_emb, model.model.norm, model.lm_head
        self.blocks = model.model.layers[cut:]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, shape (rows, length, vocab)."""
        logits: Tensor = self.head(self.norm(run_blocks(self.blocks, self.rotary, hidden)))
        return logits


def run_blocks(blocks: nn.ModuleList, rotary: nn.Module, hidden: Tensor) -> Tensor:
    """Return the hidden states behind the blocks; attention is causal, without padding."""
    positions = torch.arange(hidden.shape[1]).unsqueeze(0)
    embeddings = rotary(hidden, positions)
    for block in blocks:
        hidden = block(hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
    return hidden


class Bench:
    """One rank's side: the three variants on the same modules, and the guarded clock around them."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank, self.settings = rank, settings
        torch.manual_seed(0)
        model = LlamaForCausalLM(settings.config()).train()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.stages = nn.ModuleList([FirstStage(model, settings.cut), LastStage(model, settings.cut)])
        self.spans: Spans = {}
        self.patience = settings.quiet_budget
        transport = make_transport("auto", CPU, dist.new_group([0, 1]))
        self.runtime = PipelineRuntime(self._stage, rank, 2, transport, transport)
        self.runtime.probe.trace = self._record
        self.schedules: dict[int, Schedule1F1B] = {}
        count = max(settings.microbatches) * settings.rows
        self.ids = torch.randint(0, settings.vocab, (count, settings.length))

    def _stage(self, payload: tuple[Tensor, ...], ids: Tensor) -> Any:
        return (self.stages[0](ids),) if self.rank == 0 else self.stages[1](payload[0])

    def _record(self, name: str, wall: float, cpu: float) -> None:
        kind = name[1] if name[0].isdigit() else name.split()[0]
        self.spans.setdefault(kind, []).append(wall)

    def loss(self, logits: Tensor, ids: Tensor, microbatches: int) -> Tensor:
        """Return the summed cross entropy of the next token over the number of tokens of the whole batch."""
        tokens = microbatches * self.settings.rows * (self.settings.length - 1)
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        return nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="sum") / tokens

    def ours(self, ids: Tensor, microbatches: int) -> Tensor | None:
        """Run our runtime; return the loss on the last stage."""
        parts = ids.chunk(microbatches)
        losses = self.runtime.run(
            [{"ids": part} for part in parts],
            one_f_one_b(2, microbatches)[self.rank],
            backward=True,
            loss_of=lambda logits, i: self.loss(logits, parts[i], microbatches),
        )
        return torch.stack(losses).sum() if losses else None

    def torch(self, ids: Tensor, microbatches: int) -> Tensor | None:
        """Run torch's Schedule1F1B; return the loss on the last stage."""
        schedule = self.schedules.get(microbatches)
        if schedule is None:
            schedule = Schedule1F1B(
                PipelineStage(self.stages[self.rank], self.rank, 2, CPU),
                microbatches,
                loss_fn=lambda logits, target: self.loss(logits, target, microbatches),
                scale_grads=False,
            )
            self.schedules[microbatches] = schedule
        if self.rank == 0:
            schedule.step(ids)
            return None
        losses: list[Tensor] = []
        schedule.step(target=ids, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def single(self, ids: Tensor, microbatches: int) -> Tensor | None:
        """Run both stages on rank 0, microbatch by microbatch, while rank 1 waits; return the loss on rank 0."""
        if self.rank == 1:
            return None
        losses = []
        for part in ids.chunk(microbatches):
            loss = self.loss(self.stages[1](self.stages[0](part)), part, microbatches)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def sample(self, variant: str, microbatches: int, number: int) -> Sample:
        """Time one step of a variant, from one barrier to the next, once the machine is quiet."""
        step: Callable[[Tensor, int], Tensor | None] = getattr(self, variant)
        ids = self.ids[: microbatches * self.settings.rows]
        self.stages.zero_grad()
        self.spans.clear()
        if self.rank == 0:
            self.patience -= wait_for_quiet(self.patience, self.settings.foreign)
        dist.barrier()
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        loss = step(ids, microbatches)
        dist.barrier()
        seconds, mine = time.perf_counter() - start, time.process_time() - own
        total = busy_seconds() - busy
        facts: list[Any] = [None, None]
        dist.all_gather_object(facts, (mine, None if loss is None else float(loss), dict(self.spans)))
        foreign = max(0.0, total - facts[0][0] - facts[1][0]) / seconds
        value = next(value for _, value, _ in facts if value is not None)
        return Sample(variant, microbatches, number, seconds, foreign, value, [spans for _, _, spans in facts])

    def gradient_norm(self) -> float:
        """Return the norm of this rank's stage's gradients, to prove that the variants do the same work."""
        grads = [p.grad for p in self.stages[self.rank].parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))


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


def check_variants_agree(bench: Bench, microbatches: int) -> None:
    """Run each variant once, which also warms it up, and compare losses and gradients.

    Raises:
        RuntimeError: If two variants differ: their times would then compare nothing.
    """
    facts = {}
    for variant in VARIANTS:
        loss = bench.sample(variant, microbatches, -1).loss
        facts[variant] = (loss, bench.gradient_norm() if variant != "single" or bench.rank == 0 else None)
    for variant, values in facts.items():
        for value, reference in zip(values, facts["ours"], strict=True):
            if value is not None and reference is not None and abs(value - reference) > 1e-4 * abs(reference):
                raise RuntimeError(f"variant {variant} gives {values} and ours {facts['ours']}: loss, gradient norm.")


def rotated(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the names in an order that starts one further each round."""
    shift = number % len(names)
    return names[shift:] + names[:shift]


def worker(rank: int, settings: Settings, store: str, output: str) -> None:
    """Run one rank; rank 0 writes the samples to ``output``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    bench = Bench(rank, settings)
    for microbatches in settings.microbatches:
        check_variants_agree(bench, microbatches)
    samples = [
        bench.sample(variant, microbatches, number)
        for number in range(max(map(settings.rounds_of, settings.microbatches)))
        for microbatches in settings.microbatches
        if number < settings.rounds_of(microbatches)
        for variant in rotated(VARIANTS, number)
    ]
    if rank == 0:
        facts = {"parameters": bench.parameters, "samples": [asdict(sample) for sample in samples]}
        Path(output).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def run_both_ranks(settings: Settings, store: str, output: str) -> None:
    """Run `worker` in two fresh processes.

    Raises:
        SystemExit: If one of them failed; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(r, settings, store, output), daemon=True) for r in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"ranks exited with {[process.exitcode for process in processes]}")


def summarise(samples: Sequence[Sample], microbatches: int, foreign: float) -> dict[str, Any]:
    """Return the medians of one number of microbatches: paired ratios, and the bar that the cut allows.

    A pair is two samples of one round. Unclean pairs are left out when at least three clean ones remain; ``clean``
    tells.
    """
    here = [sample for sample in samples if sample.microbatches == microbatches]
    rounds = {number: {s.variant: s for s in here if s.round == number} for number in {s.round for s in here}}
    clean = [group for group in rounds.values() if all(sample.foreign < foreign for sample in group.values())]
    enough = len(clean) >= 3
    used = clean if enough else list(rounds.values())

    def median(value: Callable[[dict[str, Sample]], float]) -> float:
        return statistics.median(value(group) for group in used)

    costs = {
        kind: [statistics.median(t for group in used for t in group["ours"].spans[rank][kind]) for rank in (0, 1)]
        for kind in "FB"
    }
    predicted = simulate(one_f_one_b(2, microbatches), costs["F"], costs["B"])
    cut_bound = microbatches * sum(costs["F"] + costs["B"]) / predicted.makespan
    speedup = median(lambda group: group["single"].seconds / group["ours"].seconds)
    return {
        "microbatches": microbatches,
        "rounds_used": len(used),
        "clean": enough,
        "seconds": {variant: statistics.median(group[variant].seconds for group in used) for variant in VARIANTS},
        "ours_over_torch": median(lambda group: group["ours"].seconds / group["torch"].seconds),
        "speedup": speedup,
        "torch_speedup": median(lambda group: group["single"].seconds / group["torch"].seconds),
        "ideal_speedup": 2 * microbatches / (microbatches + 1),
        "cut_speedup": cut_bound,
        "of_cut_speedup": speedup / cut_bound,
        "predicted_seconds": predicted.makespan,
        "stage_seconds": costs,
        "foreign_cores": median(lambda group: max(sample.foreign for sample in group.values())),
    }


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the summaries as a table."""
    table = Table(title=title)
    for name in ("m", "ours s", "torch s", "one process s", "ours/torch", "speed-up", "torch's", "cut allows", "ideal",
                 "stage F | B ms", "rounds"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        stage = " | ".join("+".join(f"{1e3 * t:.0f}" for t in row["stage_seconds"][kind]) for kind in "FB")
        table.add_row(
            str(row["microbatches"]),
            *(f"{row['seconds'][variant]:.3f}" for variant in VARIANTS),
            f"{row['ours_over_torch']:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['torch_speedup']:.2f}",
            f"{row['cut_speedup']:.2f}",
            f"{row['ideal_speedup']:.2f}",
            stage,
            f"{row['rounds_used']} {'clean' if row['clean'] else 'UNCLEAN'}",
        )
    return table


def parse_arguments() -> tuple[Settings, Path]:
    """Return the settings and the report's path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny model, two rounds: seconds")
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(Settings.microbatches))
    parser.add_argument("--cut", type=int, default=Settings.cut, help="blocks on the first stage")
    parser.add_argument(
        "--foreign", type=float, default=Settings.foreign, help="cores of other load a clean sample allows"
    )
    parser.add_argument(
        "--quiet-budget", type=float, default=Settings.quiet_budget, help="seconds in all to wait for quiet"
    )
    parser.add_argument("--output", type=Path, default=Path("build/reports/bench-pipeline.json"))
    given = parser.parse_args()
    if given.smoke:
        small = Settings(
            (2, 4), 2, hidden=64, blocks=2, cut=1, vocab=64, length=16, quiet_budget=0.0, foreign=given.foreign
        )
        return small, given.output
    microbatches = tuple(given.microbatches)
    settings = Settings(
        microbatches, given.rounds, cut=given.cut, quiet_budget=given.quiet_budget, foreign=given.foreign
    )
    return settings, given.output


def main() -> None:
    """Run both ranks, print the table and write the report."""
    settings, output = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "samples.json"
        run_both_ranks(settings, str(Path(folder) / "store"), str(raw))
        facts = json.loads(raw.read_text())
    samples = [Sample(**sample) for sample in facts["samples"]]
    rows = [summarise(samples, microbatches, settings.foreign) for microbatches in settings.microbatches]
    title = f"{facts['parameters'] / 1e6:.1f}M parameters, 2 gloo ranks, {settings.rows} x {settings.length} tokens a microbatch"
    Console(width=140).print(table_of(rows, title))
    output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "settings": asdict(settings),
        "parameters": facts["parameters"],
        "torch": torch.__version__,
        "cores": psutil.cpu_count(),
        "summary": rows,
        "samples": facts["samples"],
    }
    output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
