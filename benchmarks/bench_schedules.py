"""Time every schedule against GPipe, and the balanced cut against the even one, on two gloo ranks with one thread each.

    python benchmarks/bench_schedules.py            # some ten minutes on a quiet machine
    python benchmarks/bench_schedules.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

Schedules: the same stack of linear layers under each of them, so a rank that has two stages has half the layers in each.
The measured bubble is 1 - busy / (ranks x step), where busy is the time inside actions; beside it stands the simulator's
bubble at the mean times of the same run's actions, by stage and kind.

Cuts: a Llama with a large vocabulary, cut by hf_parallel's own discovery and partition: evenly, balanced by counted costs,
and balanced by measured ones where that is another cut.

All samples of a part are taken in changing order within one run and compared by the median of paired ratios (see timing.py
for the guard against other load).
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
from transformers import LlamaForCausalLM

from hf_parallel.model.samples import probe_samples
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, block_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.measure import measure_costs
from hf_parallel.pipeline_parallel.plan.partition import partition
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.stage import cut_stages
from hf_parallel.pipeline_parallel.run.transport import make_transport
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients
from hf_parallel.pipeline_parallel.schedule.programs import Programs, ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.simulate import simulate
from hf_parallel.settings.sections import PipelineConfig


SCHEDULES = ("gpipe", "naive", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
CUTS = ("even", "balanced", "measured")
CPU = torch.device("cpu")
RANKS = 2


@dataclass(frozen=True)
class Settings:
    """One benchmark run; ``quiet_budget`` in seconds, ``foreign`` in cores.

    ``layers`` linear layers of ``width`` make up the model of the schedules, ``rows`` are in a microbatch. The model of the
    cuts has ``blocks`` blocks of ``hidden``, and ``length`` tokens in a microbatch.
    """

    parts: tuple[str, ...] = ("schedules", "cuts")
    microbatches: tuple[int, ...] = (4, 8)
    rounds: int = 8
    layers: int = 64
    width: int = 512
    rows: int = 256
    hidden: int = 256
    blocks: int = 8
    vocab: int = 32000
    length: int = 128
    quiet_budget: float = 120.0
    foreign: float = 0.15


class Layers(nn.Sequential):
    """One stage of the model of the schedules."""

    def forward(self, payload: tuple[Tensor, ...], x: Tensor) -> Any:
        """Return the payload of the next stage."""
        return (super().forward(payload[0] if payload else x),)


class Variant:
    """A runtime on this rank's stages, with what it needs to run a step."""

    def __init__(
        self,
        rank: int,
        choice: ScheduleChoice,
        stages: dict[int, Callable[..., Any]],
        clock: Clock,
        weights: WeightGradients | None = None,
    ) -> None:
        transports = {pair: make_transport("auto", CPU, dist.new_group([0, 1])) for pair in ((0, 1), (1, 0))}
        self.runtime = PipelineRuntime(stages, choice.placement, rank, transports, weights=weights)
        self.runtime.probe.trace = clock.trace
        self.programs = Programs(choice, rank)

    def step(self, microbatches: Sequence[dict[str, Any]], loss_of: Callable[[Any, int], Tensor]) -> float | None:
        """Run a training step; return the mean loss on the rank that has it."""
        program = self.programs.training(len(microbatches))
        losses = self.runtime.run(microbatches, program, backward=True, loss_of=loss_of)
        return float(torch.stack(losses).sum()) if losses else None


class ScheduleBench:
    """One rank's side of the schedules: two copies of all layers, one of which can put off weight gradients."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(settings.width, settings.width), nn.Tanh()) for _ in range(settings.layers)]
        self.plain, self.split = nn.ModuleList(blocks), nn.ModuleList()
        for _ in blocks:
            self.split.append(nn.Sequential(nn.Linear(settings.width, settings.width), nn.Tanh()))
        self.split.load_state_dict(self.plain.state_dict())
        weights = WeightGradients(self.split)
        self.variants = {}
        for name in SCHEDULES:
            choice = ScheduleChoice(PipelineConfig(schedule=name), RANKS)
            layers, size = (self.split if choice.splits_backward else self.plain), len(choice.placement)
            per_stage = settings.layers // size
            stages = {s: Layers(*layers[s * per_stage : (s + 1) * per_stage]) for s in choice.stages_of_ranks[rank]}
            self.variants[name] = Variant(
                rank, choice, stages, self.clock, weights if choice.splits_backward else None
            )
        self.x = torch.randn(max(settings.microbatches), settings.rows, settings.width)

    def sample(self, name: str, microbatches: int, number: int) -> Sample:
        """Time one step of a schedule."""
        self.plain.zero_grad()
        self.split.zero_grad()
        inputs = [{"x": x} for x in self.x[:microbatches]]

        def loss_of(output: tuple[Tensor], index: int) -> Tensor:
            return output[0].square().mean() / microbatches

        return self.clock.sample(name, microbatches, number, lambda: self.variants[name].step(inputs, loss_of))

    def gradient_norm(self) -> float:
        """Return the norm of the gradients of all ranks, to prove that the schedules do the same work."""
        squares = [
            p.grad.square().sum() for p in (*self.plain.parameters(), *self.split.parameters()) if p.grad is not None
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros(())
        dist.all_reduce(total)
        return float(total.sqrt())


class CutBench:
    """One rank's side of cuts: the same Llama, cut in different places."""

    def __init__(
        self, rank: int, settings: Any, names: Sequence[str], foreign: float, speeds: Sequence[float] | None = None
    ) -> None:
        self.clock = Clock(rank, foreign, settings.quiet_budget)
        config = llama_config(settings.hidden, settings.blocks, settings.vocab, settings.length)
        torch.manual_seed(0)
        self.ids = torch.randint(0, settings.vocab, (max(settings.microbatches), 1, settings.length))
        self.bounds: dict[str, list[int]] = {}
        self.variants: dict[str, Variant] = {}
        self.models: dict[str, nn.Module] = {}
        choice = ScheduleChoice(PipelineConfig(schedule="1f1b"), RANKS)
        for name in names:
            torch.manual_seed(1)
            model = LlamaForCausalLM(config).train()
            samples = probe_samples(model, settings.vocab)
            plan = discover_stages(model, samples, cost_tokens=(1, settings.length))
            costs = (
                agreed(measure_costs(model, plan, self.inputs(0))) if name == "measured" else block_costs(model, plan)
            )
            bounds = partition(
                *(plan.num_blocks, RANKS, "even" if name == "even" else "balanced", costs),
                allowed=plan.allowed_cuts(),
                schedule=choice.training(max(settings.microbatches)),
                speeds=speeds if name == "by speed" else None,
            )
            self.bounds[name] = bounds
            if name == "measured" and bounds == self.bounds["balanced"]:
                continue
            stages = cut_stages(model, plan, bounds, [rank], model.forward)
            self.models[name], self.variants[name] = model, Variant(rank, choice, dict(stages), self.clock)

    def inputs(self, index: int) -> dict[str, Any]:
        """Return one microbatch."""
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False}

    def sample(self, name: str, microbatches: int, number: int) -> Sample:
        """Time one step of a cut."""
        self.models[name].zero_grad()
        inputs = [self.inputs(index) for index in range(microbatches)]

        def loss_of(output: Any, index: int) -> Tensor:
            loss: Tensor = output.loss / microbatches
            return loss

        return self.clock.sample(name, microbatches, number, lambda: self.variants[name].step(inputs, loss_of))


def agreed(costs: StageCosts) -> StageCosts:
    """Rank 0's costs."""
    found = [costs]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank; return the samples of both parts and the bounds of the cuts."""
    facts: dict[str, Any] = {}
    if "schedules" in settings.parts:
        bench = ScheduleBench(rank, settings)
        for count in settings.microbatches:
            # Each also warms up: a schedule and a number of microbatches run once before they are timed.
            check_agreement({n: (bench.sample(n, count, -1).loss, bench.gradient_norm()) for n in SCHEDULES}, "gpipe")
        samples = all_samples(SCHEDULES, settings.microbatches, lambda count: settings.rounds, bench.sample)
        facts["schedules"] = [asdict(sample) for sample in samples]
    if "cuts" in settings.parts:
        cuts = CutBench(rank, settings, CUTS, settings.foreign)
        for count in settings.microbatches:
            check_agreement({name: (cuts.sample(name, count, -1).loss,) for name in cuts.variants}, "even")
        samples = all_samples(list(cuts.variants), settings.microbatches, lambda count: settings.rounds, cuts.sample)
        facts |= {"cuts": [asdict(sample) for sample in samples], "bounds": cuts.bounds}
    return facts


def busy_of(sample: Sample) -> float:
    """Return the seconds that both ranks spent inside actions."""
    return sum(sum(times) for spans in sample.spans for name, times in spans.items() if name[0].isdigit())


def measured_bubble(sample: Sample) -> float:
    """Return the idle share of both ranks in one step."""
    return 1.0 - busy_of(sample) / (RANKS * sample.seconds)


def mean_costs(samples: Sequence[Sample], num_stages: int) -> dict[str, list[float]]:
    """Return by stage the mean seconds of a forward ("F"), of a full backward ("B") and of what "W" puts off of it.

    A schedule may run some backwards of a stage whole and split others, so "B" is the time of all of them over their number.
    """
    total = {kind: [0.0] * num_stages for kind in "FBIW"}
    count = {kind: [0] * num_stages for kind in "FBIW"}
    for sample in samples:
        for name, times in (item for spans in sample.spans for item in spans.items() if item[0][0].isdigit()):
            kind = next(letter for letter in name if letter.isalpha())
            stage = int(name.split(kind)[0])
            total[kind][stage] += sum(times)
            count[kind][stage] += len(times)
    stages = range(num_stages)
    backward = [sum(total[kind][s] for kind in "BIW") / (count["B"][s] + count["I"][s]) for s in stages]
    return {
        "F": [total["F"][s] / count["F"][s] for s in stages],
        "B": backward,
        # Means of other microbatches: the part may have taken longer than the mean of the whole.
        "W": [min(total["W"][s] / max(1, count["W"][s]), backward[s]) for s in stages],
    }


def simulated(name: str, microbatches: int, costs: dict[str, list[float]]) -> tuple[float, float]:
    """Return the simulator's step and bubble for a schedule at these mean times of its actions."""
    choice = ScheduleChoice(PipelineConfig(schedule=name), RANKS)
    timed = simulate(choice.training(microbatches), costs["F"], costs["B"], weight_costs=costs["W"])
    return timed.makespan, timed.bubble_fraction


def schedule_rows(samples: Sequence[Sample], microbatches: int, foreign: float) -> list[dict[str, Any]]:
    """Return one row a schedule: its step against GPipe's, and its bubble against the simulator's."""
    rounds = Rounds.of(samples, microbatches, foreign)
    rows = []
    for name in SCHEDULES:
        own = [group[name] for group in rounds.used]
        num_stages = len(ScheduleChoice(PipelineConfig(schedule=name), RANKS).placement)
        costs = mean_costs(own, num_stages)
        step, bubble = simulated(name, microbatches, costs)
        seconds = statistics.median(sample.seconds for sample in own)
        measured = statistics.median(map(measured_bubble, own))
        rows.append({
            "schedule": name,
            "microbatches": microbatches,
            "seconds": seconds,
            "over_gpipe": statistics.median(rounds.paired(name, "gpipe")),
            "quartiles": quartiles(rounds.paired(name, "gpipe")),
            "measured_bubble": measured,
            "simulated_bubble": bubble,
            "bubble_error": measured - bubble,  # in shares of the step
            "simulated_seconds": step,
            "step_error": step / statistics.fmean(sample.seconds for sample in own) - 1,
            "mean_action_seconds": costs,
            "rounds_used": len(rounds.used),
            "clean": rounds.clean,
            "foreign_cores": rounds.foreign,
            "verdict": rounds.verdict,
        })  # fmt: skip
    return rows


def cut_rows(
    samples: Sequence[Sample], bounds: dict[str, list[int]], microbatches: int, foreign: float
) -> list[dict[str, Any]]:
    """Return one row a cut: its step against the even cut's, and its busy time on each rank."""
    rounds = Rounds.of(samples, microbatches, foreign)
    rows = []
    for name in rounds.used[0]:
        own = [group[name] for group in rounds.used]
        busy = [
            statistics.median(sum(sum(t) for n, t in s.spans[rank].items() if n[0].isdigit()) for s in own)
            for rank in range(RANKS)
        ]
        rows.append({
            "cut": name,
            "bounds": bounds[name],
            "same_as_measured": bounds[name] == bounds["measured"],
            "microbatches": microbatches,
            "seconds": statistics.median(sample.seconds for sample in own),
            "over_even": statistics.median(rounds.paired(name, "even")),
            "quartiles": quartiles(rounds.paired(name, "even")),
            "busy_seconds": busy,
            "rounds_used": len(rounds.used),
            "clean": rounds.clean,
            "foreign_cores": rounds.foreign,
            "verdict": rounds.verdict,
        })  # fmt: skip
    return rows


def schedule_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the schedules as a table."""
    table = Table(title=title)
    for name in ("m", "schedule", "step s", "/ gpipe", "bubble", "simulated", "error", "step, simulated", ROUNDS_HEAD):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for row in rows:
        table.add_row(
            str(row["microbatches"]),
            row["schedule"],
            f"{row['seconds']:.3f}",
            spread(row["over_gpipe"], row["quartiles"], 3),
            f"{row['measured_bubble']:.1%}",
            f"{row['simulated_bubble']:.1%}",
            f"{100 * row['bubble_error']:+.1f} points",
            f"{row['simulated_seconds']:.3f} ({row['step_error']:+.1%})",
            row["verdict"],
        )
    return table


def cut_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the cuts as a table."""
    table = Table(title=title)
    for name in ("m", "cut", "bounds", "step s", "/ even", "gain", "busy s", ROUNDS_HEAD):
        table.add_column(name, justify="left" if name in ("cut", "bounds") else "right")
    for row in rows:
        table.add_row(
            str(row["microbatches"]),
            row["cut"] + (" (= measured)" if row["cut"] == "balanced" and row["same_as_measured"] else ""),
            str(row["bounds"]),
            f"{row['seconds']:.3f}",
            spread(row["over_even"], row["quartiles"], 3),
            f"{1 / row['over_even'] - 1:+.1%}",
            " + ".join(f"{seconds:.2f}" for seconds in row["busy_seconds"]),
            row["verdict"],
        )
    return table


def parse_arguments() -> tuple[Settings, Path]:
    """Return the settings and the report's path."""
    parser = parser_of(__doc__, "build/reports/bench-schedules.json")
    parser.add_argument("--parts", nargs="+", choices=Settings.parts, default=list(Settings.parts))
    given = parser.parse_args()
    shared: dict[str, Any] = {"parts": tuple(given.parts), "foreign": given.foreign}
    if given.smoke:
        tiny = {"layers": 8, "width": 16, "rows": 4, "hidden": 32, "blocks": 3, "vocab": 400, "length": 16}
        return Settings(microbatches=(2, 4), rounds=2, quiet_budget=0.0, **tiny, **shared), given.output
    settings = Settings(
        microbatches=tuple(given.microbatches or Settings.microbatches),
        rounds=given.rounds or Settings.rounds,
        quiet_budget=given.quiet_budget,
        **shared,
    )
    return settings, given.output


def main() -> None:
    """Run both ranks, print the tables and write the report."""
    settings, output = parse_arguments()
    facts = run_both_ranks(worker, settings)
    console, report = Console(width=140), {"settings": asdict(settings)}
    for part in settings.parts:
        samples = [Sample(**sample) for sample in facts[part]]
        rows: list[dict[str, Any]] = []
        for count in settings.microbatches:
            if part == "schedules":
                rows += schedule_rows(samples, count, settings.foreign)
            else:
                rows += cut_rows(samples, facts["bounds"], count, settings.foreign)
        if part == "schedules":
            title = (
                f"{settings.layers} layers of {settings.width} x {settings.width}, {settings.rows} rows a microbatch"
            )
            console.print(schedule_table(rows, title))
        else:
            title = f"Llama, {settings.blocks} blocks of {settings.hidden}, vocabulary {settings.vocab}, 1F1B"
            console.print(cut_table(rows, title))
        report |= {part: rows}
    write_report(output, {**report, "bounds": facts.get("bounds"), "samples": facts})


if __name__ == "__main__":
    main()
