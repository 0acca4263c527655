"""Time an optimizer step of a stock Trainer on two pipeline stages against one process, on two gloo ranks with one thread each.

    python benchmarks/bench_trainer.py            # some five minutes on a quiet machine
    python benchmarks/bench_trainer.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

A Llama of 28M parameters, the balanced cut, gradient clipping and AdamW. Between two steps of the Trainer, rank 0 runs a step
of the same model in one process, microbatch by microbatch, while rank 1 waits; a ratio is one of a round. The bar is what
the schedule allows at the times of the stages in the same steps (see bench_pipeline.py), beside 2m / (m + 1) for an even cut.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from bench_pipeline import bar_of
from rich.console import Console
from rich.table import Table
from timing import (
    ROUNDS_HEAD,
    Clock,
    Rounds,
    Sample,
    llama_config,
    parser_of,
    quartiles,
    run_both_ranks,
    settings_of,
    spread,
    write_report,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback


WARM_UP = 2  # steps that are not counted


@dataclass(frozen=True)
class Settings:
    """One benchmark run; sizes in tokens and blocks, ``quiet_budget`` in seconds, ``foreign`` in cores."""

    microbatches: tuple[int, ...] = (8,)
    rounds: int = 12
    hidden: int = 512
    blocks: int = 8
    vocab: int = 2048
    length: int = 128
    quiet_budget: float = 120.0
    foreign: float = 0.15


class OneProcess:
    """The same model and optimizer, whole, on rank 0."""

    def __init__(self, settings: Settings, microbatches: int) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(llama_config(settings.hidden, settings.blocks, settings.vocab, settings.length))
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0.0)
        self.microbatches = microbatches

    def step(self, ids: Tensor) -> float:
        """An optimizer step; the loss."""
        tokens, total = ids[:, 1:].numel(), 0.0
        for part in ids.chunk(self.microbatches):
            logits = self.model(input_ids=part, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Alternate(TrainerCallback):
    """Times each step of the Trainer, and one of one process while the Trainer asks for its next batch.

    Not in a callback: what callbacks compute is watched.
    """

    def __init__(self, rank: int, settings: Settings, microbatches: int) -> None:
        self.rank, self.microbatches, self.rounds = rank, microbatches, settings.rounds
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        self.alone = OneProcess(settings, microbatches) if rank == 0 else None
        self.samples: list[Sample] = []
        self.batches = 0
        self.open: Any = None

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch; it is trained on in one process first."""
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        alone, number = self.alone, self.batches - WARM_UP
        self.batches += 1
        self.keep(
            self.clock.sample(
                "one process",
                self.microbatches,
                number,
                lambda: None if alone is None else alone.step(batch["input_ids"]),
            )
        )
        return batch

    def keep(self, sample: Sample) -> None:
        """Of the steps that count; the Trainer asks for a batch more than it trains on."""
        if 0 <= sample.round < self.rounds:
            self.samples.append(sample)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open = self.clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        number = state.global_step - 1 - WARM_UP
        self.keep(self.clock.end(self.open, "trainer", self.microbatches, number, 0.0))


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "ACCELERATE_USE_CPU": "true"}
    os.environ |= {name: str(value) for name, value in names.items()}
    samples: list[Sample] = []
    parameters = 0
    for microbatches in settings.microbatches:
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama_config(settings.hidden, settings.blocks, settings.vocab, settings.length))
        parameters = sum(p.numel() for p in model.parameters())
        ids = torch.randint(0, settings.vocab, (4 * microbatches, settings.length))
        alternate = Alternate(rank, settings, microbatches)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                model=model,
                args=TrainingArguments(
                    folder,
                    max_steps=settings.rounds + WARM_UP,
                    per_device_train_batch_size=microbatches,
                    use_cpu=True,
                    report_to=[],
                    disable_tqdm=True,
                    logging_steps=1000,
                    save_strategy="no",
                ),
                data_collator=alternate.collate,
                train_dataset=[{"input_ids": row, "labels": row} for row in ids],
                callbacks=[
                    HFParallelCallback({"pp_size": 2, "pipeline": {"num_microbatches": microbatches}}),
                    alternate,
                ],
            )
            trainer.accelerator.attach_model(model)
            trainer.accelerator.hf_parallel.engine.runtime.probe.trace = alternate.clock.trace
            trainer.train()
        samples += alternate.samples
    return {"parameters": parameters, "samples": [asdict(sample) for sample in samples]}


def summarise(samples: Sequence[Sample], microbatches: int, foreign: float) -> dict[str, Any]:
    """Medians of one number of microbatches: the speed-up, and the bar that the cut allows."""
    rounds = Rounds.of(samples, microbatches, foreign)
    bar = bar_of(rounds, "trainer", microbatches)
    ratios = rounds.paired("one process", "trainer")
    speedup = statistics.median(ratios)
    return {
        "microbatches": microbatches,
        "rounds": len(rounds.used),
        "clean": rounds.clean,
        "seconds": {
            name: rounds.median(lambda group, n=name: group[n].seconds) for name in ("trainer", "one process")
        },
        "speedup": speedup,
        "quartiles": quartiles(ratios),
        "cut_speedup": bar.speedup,
        "of_cut_speedup": speedup / bar.speedup,
        "ideal_speedup": 2 * microbatches / (microbatches + 1),
        "stage_seconds": bar.stage_seconds,
        "schedule_seconds": bar.schedule_seconds,
        "foreign_cores": rounds.foreign,
        "verdict": rounds.verdict,
    }


def main() -> None:
    """Run both ranks, print the table and write the report."""
    options = parser_of(__doc__, "build/reports/bench-trainer.json").parse_args()
    settings = settings_of(Settings, options, hidden=64, blocks=2, vocab=64, length=16)
    facts = run_both_ranks(worker, settings)
    samples = [Sample(**sample) for sample in facts["samples"]]
    rows = [summarise(samples, count, settings.foreign) for count in settings.microbatches]
    table = Table(title=f"{facts['parameters'] / 1e6:.1f}M parameters, microbatches of 1 x {settings.length} tokens")
    for name in (
        "m",
        "Trainer s",
        "one process s",
        "speed-up (quartiles)",
        "cut allows",
        "share",
        "even cut",
        ROUNDS_HEAD,
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["microbatches"]),
            *(f"{row['seconds'][name]:.3f}" for name in ("trainer", "one process")),
            spread(row["speedup"], row["quartiles"]),
            *(f"{row['cut_speedup']:.2f}", f"{row['of_cut_speedup']:.0%}", f"{row['ideal_speedup']:.2f}"),
            row["verdict"],
        )
    Console(width=120).print(table)
    write_report(options.output, {"settings": asdict(settings), "summary": rows, **facts})


if __name__ == "__main__":
    main()
