"""Time pipeline schedules against what `device_map="balanced"` does, on the same two gloo ranks with one thread each.

    python benchmarks/bench_device_map.py            # some five minutes on a quiet machine
    python benchmarks/bench_device_map.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

`device_map` puts blocks on several devices and runs the model as ever: one device is busy at a time. Here that is the batch
as one microbatch ("whole"): forward of stage 0, forward of stage 1, backward of stage 1, backward of stage 0. "naive" does
the same with one microbatch after the other, which needs less memory, and "1f1b" overlaps them. A Llama is trained in full and
with LoRA on all of its linear layers; every variant has the same batch, and stages that are cut by measured costs.

Four ranks are simulated, not measured: the same model is cut into four stages, which the two ranks run in turn; the mean
times of these stages' actions feed the simulator. Its answer for two ranks stands beside the measurement.

All samples are taken in changing order within one run and compared by the median of paired ratios (see timing.py for the
guard against other load).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_schedules import Variant, agreed, mean_costs
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
    settings_of,
    spread,
    write_report,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from hf_parallel.model.samples import probe_samples
from hf_parallel.pipeline_parallel.plan.costs import StageCosts
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.measure import measure_costs
from hf_parallel.pipeline_parallel.plan.partition import partition
from hf_parallel.pipeline_parallel.run.stage import cut_stages
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.simulate import simulate
from hf_parallel.settings.sections import PipelineConfig, ScheduleName


KINDS = ("full", "lora")
VARIANTS = ("whole", "naive", "1f1b")
SCHEDULE_OF: dict[str, ScheduleName] = {"whole": "naive", "naive": "naive", "1f1b": "1f1b", "four": "interleaved_1f1b"}
RANKS, FOUR, MICROBATCHES_OF_FOUR = 2, 4, 16


@dataclass(frozen=True)
class Settings:
    """One benchmark run; ``quiet_budget`` in seconds, ``foreign`` in cores.

    The model has ``blocks`` blocks of ``hidden``; a microbatch is ``rows`` rows of ``length`` tokens.
    """

    microbatches: tuple[int, ...] = (8,)
    rounds: int = 8
    hidden: int = 256
    blocks: int = 16
    vocab: int = 2000
    rows: int = 1
    length: int = 128
    quiet_budget: float = 120.0
    foreign: float = 0.15


class Bench:
    """One rank's side: a model in two stages under each schedule, and in four stages of which it has two."""

    def __init__(self, rank: int, settings: Settings, kind: str) -> None:
        self.rank, self.settings, self.kind = rank, settings, kind
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        torch.manual_seed(0)
        shape = (max(settings.microbatches) * settings.rows, settings.length)
        self.ids = torch.randint(0, settings.vocab, shape)  # (batch, seq)
        self.costs: StageCosts | None = None
        self.bounds: dict[str, list[int]] = {}
        self.models: dict[str, nn.Module] = {}
        self.variants: dict[str, Variant] = {}
        for name in (*VARIANTS, "four"):
            self._add(name)

    def _add(self, name: str) -> None:
        """The model, planned and cut anew: its stages keep what their runtime set."""
        settings, choice = self.settings, ScheduleChoice(PipelineConfig(schedule=SCHEDULE_OF[name]), RANKS)
        model = _model(settings, self.kind)
        plan = discover_stages(
            model, probe_samples(model, settings.vocab), cost_tokens=(settings.rows, settings.length)
        )
        if self.costs is None:  # every variant is cut alike
            self.costs = agreed(measure_costs(model, plan, self.inputs(1)[0]))
        self.bounds[name] = partition(
            *(plan.num_blocks, len(choice.placement), "balanced", self.costs), allowed=plan.allowed_cuts()
        )
        stages = cut_stages(model, plan, self.bounds[name], choice.stages_of_ranks[self.rank], model.forward)
        self.models[name] = model
        self.variants[name] = Variant(self.rank, choice, dict(stages), self.clock)

    def inputs(self, microbatches: int, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return the first microbatches, as one if `whole`."""
        ids = self.ids[: microbatches * self.settings.rows]  # (rows, seq)
        return [
            {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one, "use_cache": False}
            for one in ids.chunk(1 if whole else microbatches)
        ]

    def sample(self, name: str, microbatches: int, number: int) -> Sample:
        """Time one step of a variant on the first `microbatches` microbatches."""
        self.models[name].zero_grad()
        inputs = self.inputs(microbatches, whole=name == "whole")

        def loss_of(output: Any, index: int) -> Tensor:
            loss: Tensor = output.loss / len(inputs)
            return loss

        return self.clock.sample(name, microbatches, number, lambda: self.variants[name].step(inputs, loss_of))


def _model(settings: Settings, kind: str) -> nn.Module:
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(llama_config(settings.hidden, settings.blocks, settings.vocab, settings.length))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained: nn.Module = model.train()
    return trained


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples of both kinds of training and the bounds of the cuts."""
    facts: dict[str, Any] = {}
    for kind in KINDS:
        bench = Bench(rank, settings, kind)
        names = [*VARIANTS, "four"]
        for count in settings.microbatches:  # also warms up
            check_agreement({name: (bench.sample(name, count, -1).loss,) for name in names}, "whole")
        samples = all_samples(names, settings.microbatches, lambda count: settings.rounds, bench.sample)
        facts[kind] = {"samples": [asdict(sample) for sample in samples], "bounds": bench.bounds}
    return facts


def measured_rows(kind: str, samples: Sequence[Sample], microbatches: int, foreign: float) -> list[dict[str, Any]]:
    """Return one row a schedule: its step, and how often it fits into one of `device_map`."""
    rounds = Rounds.of(samples, microbatches, foreign)
    costs = mean_costs([group["1f1b"] for group in rounds.used], RANKS)
    return [
        {
            "training": kind,
            "schedule": name,
            "ranks": RANKS,
            "microbatches": microbatches,
            "simulated": False,
            "seconds": statistics.median(group[name].seconds for group in rounds.used),
            "times_as_fast": statistics.median(rounds.paired("whole", name)),
            "times_as_fast_as_naive": statistics.median(rounds.paired("naive", name)),
            "quartiles": quartiles(rounds.paired("naive", name)),
            "simulator_says": _ratio(RANKS, microbatches, costs) if name == "1f1b" else None,
            "rounds_used": len(rounds.used),
            "clean": rounds.clean,
            "foreign_cores": rounds.foreign,
            "verdict": rounds.verdict,
        }
        for name in VARIANTS
    ]  # fmt: skip


def simulated_row(kind: str, samples: Sequence[Sample], foreign: float) -> dict[str, Any]:
    """Return what the simulator says of four ranks at the measured times of four stages."""
    count = samples[0].microbatches
    rounds = Rounds.of(samples, count, foreign)
    costs = mean_costs([group["four"] for group in rounds.used], FOUR)
    return {
        "training": kind,
        "schedule": "1f1b",
        "ranks": FOUR,
        "microbatches": MICROBATCHES_OF_FOUR,
        "simulated": True,
        "times_as_fast_as_naive": _ratio(FOUR, MICROBATCHES_OF_FOUR, costs),
        "mean_action_seconds": {kind: costs[kind] for kind in "FB"},
        "clean": rounds.clean,
    }


def _ratio(ranks: int, microbatches: int, costs: dict[str, list[float]]) -> float:
    """Steps of 1F1B in one where a single rank is busy at a time, by the simulator without latency."""
    one, other = (
        simulate(
            ScheduleChoice(PipelineConfig(schedule=name), ranks).training(microbatches), costs["F"], costs["B"]
        ).makespan
        for name in ("naive", "1f1b")
    )
    return one / other


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table."""
    table = Table(title=title)
    for name in ("training", "schedule", "ranks", "m", "step s", "x whole", "x naive", "simulator", ROUNDS_HEAD):
        table.add_column(name, justify="left" if name in ("training", "schedule") else "right")
    for row in rows:
        seconds = "simulated" if row["simulated"] else f"{row['seconds']:.3f}"
        whole = "" if row["simulated"] else f"{row['times_as_fast']:.2f}"
        said = f"{row['simulator_says']:.2f}" if row.get("simulator_says") else ""
        naive = row["times_as_fast_as_naive"]
        fast = f"{naive:.2f}" if row["simulated"] else spread(naive, row["quartiles"])
        table.add_row(
            *(row["training"], row["schedule"], str(row["ranks"]), str(row["microbatches"]), seconds, whole),
            *(fast, said, row.get("verdict", "")),
        )
    return table


def parse_arguments() -> tuple[Settings, Path]:
    """Return the settings and the report's path."""
    given = parser_of(__doc__, "build/reports/bench-device-map.json").parse_args()
    tiny = {"hidden": 32, "blocks": 5, "vocab": 100, "rows": 1, "length": 16}
    return settings_of(Settings, given, **tiny), given.output


def main() -> None:
    """Run both ranks, print the table and write the report."""
    settings, output = parse_arguments()
    facts = run_both_ranks(worker, settings)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        samples = [Sample(**sample) for sample in facts[kind]["samples"]]
        for count in settings.microbatches:
            rows += measured_rows(kind, samples, count, settings.foreign)
        last = [sample for sample in samples if sample.microbatches == settings.microbatches[-1]]
        rows.append(simulated_row(kind, last, settings.foreign))
    title = f"Llama, {settings.blocks} blocks of {settings.hidden}; microbatches of {settings.rows} x {settings.length} tokens"
    Console(width=140).print(table_of(rows, title))
    write_report(output, {"settings": asdict(settings), "rows": rows, "samples": facts})


if __name__ == "__main__":
    main()
