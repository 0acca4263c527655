"""Time what the guards cost a training step, on two gloo ranks with one thread each.

    python benchmarks/bench_guards.py            # some minutes on a quiet machine
    python benchmarks/bench_guards.py --smoke    # seconds; checks that everything runs, its numbers mean nothing

Optimizer steps of 8 microbatches of the same Llama and layout, as they are and with every guard of `hf_parallel.guards` that
runs in a step replaced by nothing, here only: there is no switch for users. Samples are taken in changing order within one
run and compared by the median of paired ratios (see timing.py for the guard against other load). Since half a percent is
less than one sample scatters, the time inside of the guards is also measured by itself: `inside` is wall time, waiting for
messages included, `CPU` what the guards compute. It grows with the number of parameters and of batches, not with tokens: the
share of a step is larger with shorter rows (`--length`). Guards without a moment of their own in a step are not listed: common
weights (`guards.weights.alike`) are looked at by the digests of batches, `crossing` once when an optimizer is prepared, `state_dicts` in a
state dict.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
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
from transformers import LlamaForCausalLM

from hf_parallel import HFParallelPlugin
from hf_parallel.batches import BatchCheck, RandomCheck
from hf_parallel.engine.gradients.changed_parts import ChangedParts
from hf_parallel.engine.gradients.optimizer_states import OptimizerStates
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss
from hf_parallel.guards.calls import batches
from hf_parallel.guards.calls.backwards import Backwards
from hf_parallel.guards.calls.part_hooks import PartHooks
from hf_parallel.guards.gradients.arrivals import Arrivals
from hf_parallel.guards.gradients.batch_hooks import BatchHooks
from hf_parallel.guards.gradients.direct import DirectGradients
from hf_parallel.guards.gradients.hooks import HookGuard
from hf_parallel.guards.gradients.showing import ShownGradients
from hf_parallel.guards.optimizers.states import PartStates
from hf_parallel.guards.optimizers.stepping import OwnHooks
from hf_parallel.guards.weights.buffers import MovingBuffers
from hf_parallel.guards.weights.drift import WeightsOfSteps
from hf_parallel.guards.weights.exchanged import WeightGuard
from hf_parallel.guards.weights.freezing import Freezing
from hf_parallel.guards.weights.trained import TrainedWord


VARIANTS = ("guarded", "bare")
MICROBATCHES = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2, "num_microbatches": MICROBATCHES},
    "pp2 loop": {"pp_size": 2, "num_microbatches": MICROBATCHES},  # as with user code between loader and model
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "tp2": {"tp_size": 2},
}
UNGUARDED: tuple[tuple[Any, str, Any], ...] = (
    *((Arrivals, name, None) for name in ("set_aside", "hide", "show", "put_back", "settle", "note", "note_all")),
    (Arrivals, "use", True),
    *((Backwards, name, None) for name in ("scaled", "lost", "arrived", "agree", "agree_later")),
    (BatchCheck, "check", None),
    (BatchHooks, "ask", False),
    (batches, "_state", None),
    *((batches.BatchDigests, name, None) for name in ("put", "arrived", "judge")),
    *((batches.SharedBatch, name, None) for name in ("begin", "settle", "end_step")),
    (batches.SharedBatch, "judging", contextlib.nullcontext()),
    (DirectGradients, "watch", None),
    (DirectGradients, "stop", None),
    (Engine, "check_installed", None),
    *((Freezing, name, value) for name, value in (("begin", False), ("put", None), ("arrived", None), ("finish", ()))),
    (OptimizerStates, "guard", None),
    *((ChangedParts, name, None) for name in ("remember", "remember_again", "refuse_changes", "judge")),
    (HookGuard, "check", None),
    (MovingBuffers, "watching", contextlib.nullcontext()),
    (MovingBuffers, "end_step", None),
    (OwnHooks, "begin", None),
    (PartHooks, "check", None),
    (PartStates, "_check", None),
    (MicrobatchLoss, "check", None),
    (RandomCheck, "watching", contextlib.nullcontext()),
    *((ShownGradients, name, None) for name in ("show", "show_between", "take_between", "compare_factors")),
    *((ShownGradients, name, None) for name in ("show_after_step", "cleared")),
    (ShownGradients, "take_back", ()),
    (ShownGradients, "withdrawn", contextlib.nullcontext()),
    (TrainedWord, "now", 1),
    (WeightGuard, "check", None),
    (WeightsOfSteps, "update", None),
    (WeightsOfSteps, "digests", [0, 0]),
)


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    layouts: tuple[str, ...] = tuple(LAYOUTS)
    rounds: int = 20
    steps: int = 1
    hidden: int = 384
    blocks: int = 6
    vocab: int = 4096
    length: int = 256
    foreign: float = 0.15
    quiet_budget: float = 120.0


class Switch:
    """Puts the guards in place, with a clock around them, or nothing."""

    def __init__(self) -> None:
        self._own = [(owner, name, getattr(owner, name)) for owner, name, _ in UNGUARDED]
        self._depth = 0
        self.wall_s = self.cpu_s = 0.0
        self.by_name: dict[str, float] = {}

    def set(self, variant: str) -> None:
        """Make the guards those of a variant."""
        for (owner, name, own), (_, _, nothing) in zip(self._own, UNGUARDED, strict=True):
            label = f"{getattr(owner, '__name__', '?').rpartition('.')[2]}.{name}"
            setattr(owner, name, self._timed(own, label) if variant == "guarded" else _returns(nothing))

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self.wall_s += time.perf_counter() - wall
                spent = time.thread_time() - cpu
                self.cpu_s += spent
                self.by_name[label] = self.by_name.get(label, 0.0) + spent

        return timed

    def spent(self) -> tuple[float, float]:
        """Wall and CPU seconds inside of the guards since the last call."""
        spent = self.wall_s, self.cpu_s
        self.wall_s = self.cpu_s = 0.0
        return spent


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class Bench:
    """One rank's side of a layout: one model that both variants train on."""

    def __init__(self, rank: int, settings: Settings, layout: str, switch: Switch) -> None:
        self.settings, self.layout, self.switch = settings, layout, switch
        self.clock = Clock(rank, settings.foreign, settings.quiet_budget)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.staged = layout.startswith("pp")
        plugin = HFParallelPlugin({}, **LAYOUTS[layout])
        steps = 1 if self.staged else MICROBATCHES
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, parallelism_config=plugin)
        model = self._model()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        )
        torch.manual_seed(0 if LAYOUTS[layout].keys() & {"pp_size", "tp_size"} else rank)
        rows = torch.randint(0, settings.vocab, (MICROBATCHES, settings.length))
        self.batches = [rows] if self.staged else list(rows.split(1))
        self.spent: list[tuple[str, float, float]] = []

    def _model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        settings = self.settings
        config = llama_config(settings.hidden, settings.blocks, settings.vocab, settings.length)
        return LlamaForCausalLM(config).train()

    def step(self) -> float:
        """One optimizer step; the loss of its last batch."""
        loss = torch.zeros(())
        engine: Any = self.accelerator.hf_parallel.engine  # type: ignore[attr-defined]
        for ids in self.batches:
            batch = {"input_ids": ids, "labels": ids}
            if self.layout == "pp2":
                engine.begin_window([batch])  # as the Trainer does
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(loss.detach())

    def sample(self, variant: str, microbatches: int, number: int) -> Sample:
        """Time the steps of a variant."""
        self.switch.set(variant)
        self.switch.spent()

        def steps() -> float:
            for _ in range(self.settings.steps):
                loss = self.step()
            return loss

        sample = self.clock.sample(variant, microbatches, number, steps)
        mine = torch.tensor(self.switch.spent(), dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        if variant == "guarded" and number >= 0:
            self.spent.append((variant, *mine.tolist()))
        return sample

    def reset(self) -> None:
        """Forget what was measured while it warmed up."""
        self.switch.by_name.clear()

    def facts(self) -> dict[str, Any]:
        """What was measured inside of the guards."""
        steps = self.settings.rounds * self.settings.steps
        by_name = {name: 1e3 * spent / steps for name, spent in sorted(self.switch.by_name.items())}
        return {"cpu_ms_of_rank_0": by_name, "spent": self.spent, "parameters": self.parameters}


def measured(
    rank: int, settings: Settings, kind: type[Bench], switch: Any, variants: tuple[str, str]
) -> dict[str, Any]:
    """Run one rank; return by layout its samples of both variants, and what its bench measured inside of steps."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found: dict[str, Any] = {}
    for layout in settings.layouts:
        bench = kind(rank, settings, layout, switch)
        for _ in range(4):  # the first steps compare batches byte by byte
            facts = {name: (bench.sample(name, MICROBATCHES, -1).loss,) for name in variants}
        check_agreement(facts, "bare")
        bench.reset()
        samples = all_samples(variants, [MICROBATCHES], lambda count: settings.rounds, bench.sample)
        found[layout] = {"samples": [asdict(sample) for sample in samples], **bench.facts()}
        switch.set(variants[0])
        with contextlib.suppress(AttributeError):
            bench.accelerator.hf_parallel.watchdog.stop()  # type: ignore[attr-defined]
    return found


def worker(rank: int, settings: Settings) -> dict[str, Any]:
    """Run one rank."""
    return measured(rank, settings, Bench, Switch(), VARIANTS)


def row_of(layout: str, found: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What the samples of a layout say."""
    samples = [Sample(**sample) for sample in found["samples"]]
    rounds = Rounds.of(samples, MICROBATCHES, settings.foreign)
    ratios = rounds.paired("guarded", "bare")
    seconds = rounds.median(lambda group: group["bare"].seconds)
    cpu = rounds.median(lambda group: group["bare"].cpu) / 2  # of one rank
    middle = len(found["spent"]) // 2
    inside, inside_cpu = (sorted(one[k] for one in found["spent"])[middle] for k in (1, 2))
    return {
        "layout": layout,
        "seconds": seconds / settings.steps,
        "ratio": statistics.median(ratios),
        "quartiles": quartiles(ratios),
        "cpu_ratio": rounds.median(lambda group: group["guarded"].cpu / group["bare"].cpu),
        "inside_s": inside / settings.steps,
        "inside_share": inside / seconds,
        "inside_cpu_s": inside_cpu / settings.steps,
        "inside_cpu_share": inside_cpu / cpu,
        "foreign_cores": rounds.foreign,
        "verdict": rounds.verdict,
    }


HEAD = (
    "layout",
    "step ms",
    "guarded / bare (quartiles)",
    "CPU / CPU",
    "inside ms",
    "inside %",
    "inside CPU ms",
    "CPU %",
    ROUNDS_HEAD,
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    return (
        row["layout"],
        f"{1e3 * row['seconds']:.0f}",
        spread(row["ratio"], row["quartiles"], 4),
        f"{row['cpu_ratio']:.4f}",
        f"{1e3 * row['inside_s']:.2f}",
        f"{100 * row['inside_share']:.2f}",
        f"{1e3 * row['inside_cpu_s']:.2f}",
        f"{100 * row['inside_cpu_share']:.2f}",
        row["verdict"],
    )


def rows_of(found: dict[str, Any], settings: Settings) -> Sequence[dict[str, Any]]:
    """One row for each layout."""
    return [row_of(layout, found[layout], settings) for layout in settings.layouts]


def main() -> None:
    """Run both ranks, print the table and write the report."""
    parser = parser_of(__doc__, "build/reports/bench-guards.json")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=None)
    parser.add_argument("--length", type=int, default=Settings.length, help="tokens of a microbatch")
    given = parser.parse_args()
    chosen: dict[str, Any] = {"foreign": given.foreign, "quiet_budget": given.quiet_budget}
    chosen["layouts"] = tuple(given.layouts or LAYOUTS)
    if given.smoke:
        tiny = {"hidden": 64, "blocks": 2, "vocab": 64, "length": 8, "rounds": 2, "quiet_budget": 0.0}
        settings = Settings(**{**chosen, **tiny})
    else:
        settings = Settings(**chosen, rounds=given.rounds or Settings.rounds, length=given.length)
    found = run_both_ranks(worker, settings)
    rows = rows_of(found, settings)
    size = found[settings.layouts[0]]["parameters"] / 1e6
    table = Table(
        *HEAD, title=f"Llama of {size:.1f}M parameters, 2 gloo ranks, {MICROBATCHES} x {settings.length} tokens"
    )
    for row in rows:
        table.add_row(*cells(row))
    Console(width=140).print(table)
    write_report(given.output, {"settings": asdict(settings), "rows": rows, "samples": found})


if __name__ == "__main__":
    main()
