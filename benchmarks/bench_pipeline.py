"""Time our 1F1B runtime against torch's Schedule1F1B and against one process, on two gloo ranks with one thread each.

    python benchmarks/bench_pipeline.py            # about five minutes on a quiet machine
    python benchmarks/bench_pipeline.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

The three variants run the same stage modules on the same batch, interleaved in changing order within one run, and are
compared by the median of paired ratios (see timing.py for the guard against other load). The bar to beat is not
2m / (m + 1) but the makespan of the schedule at the stage times measured in the same run, because an uneven cut costs
more than any message does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
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
    llama_config,
    parser_of,
    quartiles,
    run_both_ranks,
    spread,
    write_report,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.transport import make_transport
from hf_parallel.pipeline_parallel.schedule.programs import Programs, ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.schedules import one_f_one_b
from hf_parallel.pipeline_parallel.schedule.simulate import simulate
from hf_parallel.settings.sections import PipelineConfig


VARIANTS = ("ours", "torch", "single")
CPU = torch.device("cpu")


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
        return llama_config(self.hidden, self.blocks, self.vocab, self.length)


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
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        transports = {pair: make_transport("auto", CPU, dist.new_group([0, 1])) for pair in ((0, 1), (1, 0))}
        self.runtime = PipelineRuntime({rank: self._stage}, (0, 1), rank, transports)
        self.runtime.probe.trace = self.clock.trace
        self.programs = Programs(ScheduleChoice(PipelineConfig(schedule="1f1b"), 2), rank)
        self.schedules: dict[int, Schedule1F1B] = {}
        count = max(settings.microbatches) * settings.rows
        self.ids = torch.randint(0, settings.vocab, (count, settings.length))

    def _stage(self, payload: tuple[Tensor, ...], ids: Tensor) -> Any:
        return (self.stages[0](ids),) if self.rank == 0 else self.stages[1](payload[0])

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
            self.programs.training(microbatches),
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
        """Time one step of a variant."""
        run: Callable[[Tensor, int], Tensor | None] = getattr(self, variant)
        ids = self.ids[: microbatches * self.settings.rows]
        self.stages.zero_grad()

        def step() -> float | None:
            loss = run(ids, microbatches)
            return None if loss is None else float(loss)

        return self.clock.sample(variant, microbatches, number, step)

    def gradient_norm(self) -> float:
        """Return the norm of this rank's stage's gradients, to prove that the variants do the same work."""
        grads = [p.grad for p in self.stages[self.rank].parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))


def check_variants_agree(bench: Bench, microbatches: int) -> None:
    """Run each variant once, which also warms it up, and compare losses and gradients."""
    facts: dict[str, tuple[float | None, ...]] = {}
    for variant in VARIANTS:
        loss = bench.sample(variant, microbatches, -1).loss
        facts[variant] = (loss, bench.gradient_norm() if variant != "single" or bench.rank == 0 else None)
    check_agreement(facts, "ours")


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples."""
    bench = Bench(rank, settings)
    for microbatches in settings.microbatches:
        check_variants_agree(bench, microbatches)
    samples = all_samples(VARIANTS, settings.microbatches, settings.rounds_of, bench.sample)
    return {"parameters": bench.parameters, "samples": [asdict(sample) for sample in samples]}


@dataclass(frozen=True)
class Bar:
    """What the cut allows, by the times of the stages: their seconds by "F" and "B", those of the schedule, the speed-up."""

    stage_seconds: dict[str, list[float]]
    schedule_seconds: float
    speedup: float


def bar_of(rounds: Rounds, variant: str, microbatches: int) -> Bar:
    """The bar of 1F1B over the actions that a variant's samples have."""

    def seconds_of(rank: int, kind: str) -> float:
        spans = [group[variant].spans[rank] for group in rounds.used]
        return statistics.median(t for own in spans for name, times in own.items() if name[1] == kind for t in times)

    costs = {kind: [seconds_of(rank, kind) for rank in (0, 1)] for kind in "FB"}
    makespan = simulate(one_f_one_b(2, microbatches), costs["F"], costs["B"]).makespan
    return Bar(costs, makespan, microbatches * sum(costs["F"] + costs["B"]) / makespan)


def summarise(samples: Sequence[Sample], microbatches: int, foreign: float) -> dict[str, Any]:
    """Return the medians of one number of microbatches: paired ratios, and the bar that the cut allows."""
    rounds = Rounds.of(samples, microbatches, foreign)
    bar = bar_of(rounds, "ours", microbatches)
    ratios, speedups = rounds.paired("ours", "torch"), rounds.paired("single", "ours")
    speedup = statistics.median(speedups)
    return {
        "microbatches": microbatches,
        "rounds_used": len(rounds.used),
        "clean": rounds.clean,
        "seconds": {variant: rounds.median(lambda group, v=variant: group[v].seconds) for variant in VARIANTS},
        "ours_over_torch": statistics.median(ratios),
        "quartiles": quartiles(ratios),
        "speedup": speedup,
        "speedup_quartiles": quartiles(speedups),
        "torch_speedup": statistics.median(rounds.paired("single", "torch")),
        "ideal_speedup": 2 * microbatches / (microbatches + 1),
        "cut_speedup": bar.speedup,
        "of_cut_speedup": speedup / bar.speedup,
        "predicted_seconds": bar.schedule_seconds,
        "stage_seconds": bar.stage_seconds,
        "foreign_cores": rounds.foreign,
        "verdict": rounds.verdict,
    }


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the summaries as a table."""
    table = Table(title=title)
    for name in ("m", "ours s", "torch s", "one process s", "ours/torch", "speed-up", "torch's", "cut allows", "ideal",
                 "stage F | B ms", ROUNDS_HEAD):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        stage = " | ".join("+".join(f"{1e3 * t:.0f}" for t in row["stage_seconds"][kind]) for kind in "FB")
        table.add_row(
            str(row["microbatches"]),
            *(f"{row['seconds'][variant]:.3f}" for variant in VARIANTS),
            spread(row["ours_over_torch"], row["quartiles"], 3),
            spread(row["speedup"], row["speedup_quartiles"]),
            f"{row['torch_speedup']:.2f}",
            f"{row['cut_speedup']:.2f}",
            f"{row['ideal_speedup']:.2f}",
            stage,
            row["verdict"],
        )
    return table


def parse_arguments() -> tuple[Settings, Path]:
    """Return the settings and the report's path."""
    parser = parser_of(__doc__, "build/reports/bench-pipeline.json")
    parser.add_argument("--cut", type=int, default=Settings.cut, help="blocks on the first stage")
    given = parser.parse_args()
    if given.smoke:
        small = Settings(
            (2, 4), 2, hidden=64, blocks=2, cut=1, vocab=64, length=16, quiet_budget=0.0, foreign=given.foreign
        )
        return small, given.output
    microbatches = tuple(given.microbatches or Settings.microbatches)
    settings = Settings(
        microbatches,
        given.rounds or Settings.rounds,
        cut=given.cut,
        quiet_budget=given.quiet_budget,
        foreign=given.foreign,
    )
    return settings, given.output


def main() -> None:
    """Run both ranks, print the table and write the report."""
    settings, output = parse_arguments()
    facts = run_both_ranks(worker, settings)
    samples = [Sample(**sample) for sample in facts["samples"]]
    rows = [summarise(samples, microbatches, settings.foreign) for microbatches in settings.microbatches]
    title = f"{facts['parameters'] / 1e6:.1f}M parameters, 2 gloo ranks, {settings.rows} x {settings.length} tokens a microbatch"
    Console(width=140).print(table_of(rows, title))
    write_report(output, {"settings": asdict(settings), "summary": rows, **facts})


if __name__ == "__main__":
    main()
