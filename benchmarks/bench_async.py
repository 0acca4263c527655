"""Schedules that do not drain the pipeline: how long ranks are idle, and what old weights do to the loss.

    python benchmarks/bench_async.py            # minutes; writes the tables of docs/asynchronous.md and its picture
    python benchmarks/bench_async.py --smoke    # seconds; its numbers mean nothing and no page is written

Idle: stock Trainers on 2 and 4 ranks train a small Llama whose stages sleep for a set time in each pass, so that stages are
equal and ranks need no cores of their own. The idle share is 1 - busy / wall of the steps in the middle of an epoch, where busy
is the time inside actions: everything else counts as idle, the Trainer's own work and the optimizer too.

Loss: one process, whose gradients are made of weights that are some updates old. That is what the ranks of an asynchronous
schedule compute (tests/ranks/test_asynchronous.py). Byte-level Llamas read this repository's documentation.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tables import with_tables
from timing import parser_of, write_report
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from rank_runner import run_ranks  # noqa: E402

from hf_parallel import HFParallelCallback  # noqa: E402
from hf_parallel.model.tensors import tensors_in  # noqa: E402
from hf_parallel.pipeline_parallel.schedule.actions import Action  # noqa: E402
from hf_parallel.pipeline_parallel.schedule.asynchronous import several_steps  # noqa: E402
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule  # noqa: E402
from hf_parallel.pipeline_parallel.schedule.show import write_picture  # noqa: E402
from hf_parallel.pipeline_parallel.schedule.simulate import simulate  # noqa: E402


PAGE, PICTURE = ROOT / "docs" / "asynchronous.md", ROOT / "docs" / "asynchronous.png"
ACTION = re.compile(r"[0-9]+[FB][0-9]+")
APART = "pipedream, vertical_sync: false"


@dataclass(frozen=True)
class Settings:
    """Times in seconds; ``steps`` of a run of the first part, ``updates`` of one of the second."""

    forward_s: float = 0.15
    backward_s: float = 0.3
    steps: int = 7
    sizes: tuple[tuple[int, int], ...] = ((2, 1), (2, 4), (4, 3), (4, 8))
    updates: int = 150
    base_updates: int = 300
    seeds: tuple[int, ...] = (0, 1)


# -- idle time -------------------------------------------------------------------------------------------------------


def small_llama(hidden: int, layers: int) -> LlamaForCausalLM:
    """A byte-level Llama with fresh weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
        )
    )


class Sleeps(TrainerCallback):
    """Makes every pass of this rank's stage last a set time, and notes busy and wall seconds of each step."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.busy = settings, 0.0
        self.steps: list[tuple[float, float]] = []
        self.trainer: Trainer | None = None
        self._last: tuple[float, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        runtime = self.trainer.accelerator.hf_parallel_engine.runtime
        runtime.stages = {index: self._slow(stage) for index, stage in runtime.stages.items()}
        runtime.probe.trace = self._trace

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter(), self.busy
        if self._last is not None:
            self.steps.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now

    def _trace(self, name: str, wall: float, cpu: float) -> None:
        if ACTION.fullmatch(name):
            self.busy += wall

    def _slow(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            output = stage(*args, **kwargs)
            made = next(tensor for tensor in tensors_in(output) if tensor.requires_grad)
            made.register_hook(self._wait)
            time.sleep(max(0.0, self.settings.forward_s - (time.perf_counter() - begun)))
            return output

        return run

    def _wait(self, gradient: Tensor) -> None:
        time.sleep(self.settings.backward_s)


def idle_main(
    rank: int, world_size: int, cases: list[tuple[str, int]], settings: Settings
) -> list[tuple[float, float]]:
    """Of each case the idle share of this rank and the median step of the middle of the run, in seconds."""
    found = []
    for schedule, count in cases:
        sleeps = Sleeps(settings)
        steps = settings.steps + (2 * world_size if count == 1 else 0)  # pipedream fills and drains for p - 1 steps
        data = [
            {"input_ids": torch.full((8,), i % 256), "labels": torch.full((8,), i % 256)} for i in range(count * steps)
        ]
        options = {"schedule": schedule}
        if schedule == APART:
            options = {"schedule": "pipedream", "vertical_sync": False}
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=count,
                max_steps=steps,
                max_grad_norm=0.0 if schedule == APART else 1.0,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
            )
            callback = HFParallelCallback({}, pp_size=world_size, num_microbatches=count, **options)
            trainer = Trainer(
                model=small_llama(32, world_size), args=arguments, train_dataset=data, callbacks=[callback, sleeps]
            )
            sleeps.trainer = trainer
            trainer.train()
            trainer.accelerator.hf_parallel.watchdog.stop()
        ends = world_size if count == 1 else 1
        middle = sleeps.steps[ends : -ends - 1]
        wall, busy = (sum(step[k] for step in middle) for k in (0, 1))
        found.append((1.0 - busy / wall, statistics.median(step[0] for step in middle)))
    return found


def measure_idle(settings: Settings) -> list[dict[str, Any]]:
    """A row a layout and schedule."""
    rows = []
    for pp_size in sorted({pp_size for pp_size, _ in settings.sizes}):
        counts = [count for size, count in settings.sizes if size == pp_size]
        cases = [(name, count) for count in counts for name in ("1f1b", "pipedream_2bw")]
        cases += [(name, 1) for name in ("1f1b", "pipedream", APART) if ("1f1b", 1) not in cases or name != "1f1b"]
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(
                idle_main,
                pp_size,
                cases,
                settings,
                tmp_path=Path(folder),
                timeout=250,
                env={"ACCELERATE_USE_CPU": "true"},
            )
        for index, (schedule, count) in enumerate(cases):
            idle = [rank[index][0] for rank in ranks]
            seconds = statistics.median(rank[index][1] for rank in ranks)
            rows.append(
                {
                    "pp": pp_size,
                    "microbatches": count,
                    "schedule": schedule,
                    "idle": sum(idle) / len(idle),
                    "formula": (pp_size - 1) / (count + pp_size - 1),
                    "step_s": seconds,
                    "ideal_s": count * (settings.forward_s + settings.backward_s),
                }
            )
    return rows


def idle_table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    lines = [
        "| ranks p | microbatches m | schedule | idle, measured | (p - 1) / (m + p - 1) | step | m (F + B) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        formula = f"{row['formula']:.1%}" if row["schedule"] == "1f1b" else ""
        lines.append(
            f"| {row['pp']} | {row['microbatches']} | `{row['schedule']}` | {row['idle']:.1%} | {formula} | "
            f"{row['step_s']:.3f} s | {row['ideal_s']:.3f} s |"
        )
    return lines


# -- loss ------------------------------------------------------------------------------------------------------------


def text() -> tuple[Tensor, Tensor]:
    """Bytes of the documentation: to train on, and the last tenth to evaluate on."""
    content = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")) if path != PAGE)
    found = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    split = len(found) * 9 // 10
    return found[:split], found[split:]


def batches(data: Tensor, seed: int, rows: int = 8, length: int = 64) -> Iterator[Tensor]:
    """Random rows i[rows length] for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length, (rows,), generator=generator)
        yield torch.stack([data[start : start + length] for start in starts.tolist()])


class Both:
    """Two optimizers, as one: Muon for the matrices of the blocks, AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
        rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
        self.parts = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]

    def step(self) -> None:
        """Step both."""
        for part in self.parts:
            part.step()


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW, lr 1e-3": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "AdamW, lr 5e-3": lambda model: torch.optim.AdamW(model.parameters(), lr=5e-3),
    "SGD, momentum 0.9, lr 0.1": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Muon, lr 0.02, and AdamW": Both,
}


def _adamw(rate: float) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate)


TUNING: dict[str, Callable[[nn.Module], Any]] = {f"AdamW, lr {rate:g}": _adamw(rate) for rate in (1e-4, 5e-4, 2e-3)}
BY_STAGE = "3 to 0"  # without vertical sync
DELAYS = (0, 1, 3, BY_STAGE)
STAGES = ("embed_tokens", ".layers.0.", ".layers.1.", "norm.weight", "lm_head")  # the last two are of one


def delays_of_parameters(model: nn.Module, delay: int | str) -> list[int]:
    """By how many updates each parameter is older in a forward pass than the newest."""
    names = [name for name, _ in model.named_parameters()]
    if delay != BY_STAGE:
        return [int(delay)] * len(names)
    return [max(0, 3 - next(i for i, part in enumerate(STAGES) if part in name)) for name in names]


def train(model: LlamaForCausalLM, optimizer: Any, delay: int | str, updates: int, seed: int) -> float:
    """W(t + 1) = W(t) - f(gradient at W(t - delay)); the loss on the rest of the text."""
    data, rest = text()
    parameters = list(model.parameters())
    delays = delays_of_parameters(model, delay)
    versions: deque[list[Tensor]] = deque(maxlen=max(delays) + 1)
    for _, rows in zip(range(updates), batches(data, seed), strict=False):
        versions.append([p.detach().clone() for p in parameters])
        with torch.no_grad():
            old = [versions[max(0, len(versions) - 1 - own)][i] for i, own in enumerate(delays)]
            torch._foreach_copy_(parameters, old)
        model(input_ids=rows, labels=rows).loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, versions[-1])
        if delay != BY_STAGE:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        model.zero_grad()
    with torch.no_grad():
        losses = [
            float(model(input_ids=rows, labels=rows).loss)
            for _, rows in zip(range(16), batches(rest, 1234), strict=False)
        ]
    return sum(losses) / len(losses)


def measure_loss(settings: Settings) -> list[dict[str, Any]]:
    """A row a kind of run: the loss without delay, and the change by each delay, of every seed."""
    torch.set_num_threads(1)
    bases = {}
    for seed in settings.seeds:
        torch.manual_seed(seed)
        base = small_llama(64, 2)
        train(base, torch.optim.AdamW(base.parameters(), lr=1e-3), 0, settings.base_updates, seed)
        bases[seed] = base.state_dict()
    rows = []
    for begins, kinds in (("from scratch", OPTIMIZERS), ("fine-tuning", TUNING)):
        for name, make in kinds.items():
            found: dict[str, dict[str, float]] = {str(delay): {} for delay in DELAYS}
            for seed in settings.seeds:
                for delay in DELAYS:
                    torch.manual_seed(seed)
                    model = small_llama(64, 2)
                    if begins == "fine-tuning":
                        model.load_state_dict(bases[seed])
                    found[str(delay)][str(seed)] = train(model, make(model), delay, settings.updates, 100 + seed)
            rows.append({"run": begins, "optimizer": name, "losses": found})
    return rows


def joined(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the losses of other seeds that an earlier run has measured."""
    known = {(row["run"], row["optimizer"]): row["losses"] for row in before}
    for row in rows:
        for delay, losses in known.get((row["run"], row["optimizer"]), {}).items():
            row["losses"][delay] = {**losses, **row["losses"][delay]}
    return rows


def loss_table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    seeds = sorted(rows[0]["losses"]["0"])
    lines = [
        f"| run, seeds {' and '.join(seeds)} | loss, no delay | 1 step old | 3 steps old | {BY_STAGE} by stage, not clipped |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        plain, *others = ([row["losses"][str(delay)][seed] for seed in seeds] for delay in DELAYS)
        changes = [", ".join(f"{b / a - 1:+.2%}" for a, b in zip(plain, other, strict=True)) for other in others]
        lines.append(
            f"| {row['run']}, {row['optimizer']} | {', '.join(f'{loss:.3f}' for loss in plain)} | {' | '.join(changes)} |"
        )
    return lines


# -- all of it -------------------------------------------------------------------------------------------------------


def draw() -> None:
    """1F1B and both asynchronous schedules, of four ranks, on one time axis."""
    pp_size, count, steps = 4, 4, 4
    drained = [
        [Action(one.stage, one.kind, one.microbatch + step * count) for step in range(steps) for one in actions]
        for actions in build_schedule("1f1b", pp_size, count)
    ]
    shown = {
        f"1f1b, {steps} steps of {count}": drained,
        f"pipedream_2bw, {steps} steps of {count}": several_steps("pipedream_2bw", pp_size, count, steps),
        f"pipedream, {steps * count} steps of 1": several_steps("pipedream", pp_size, 1, steps * count),
    }
    write_picture(
        PICTURE,
        {title: simulate(actions, [1.0] * pp_size, [2.0] * pp_size) for title, actions in shown.items()},
        "png",
    )


def main() -> None:
    """Measure, print, and write the page."""
    parser = parser_of(__doc__, "build/reports/bench-async.json")
    parser.add_argument("--part", choices=("idle", "loss", "picture"), default=None, help="only one of them")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1), help="those of earlier runs stay in the report"
    )
    given = parser.parse_args()
    settings = Settings(0.002, 0.004, 5, ((2, 2),), 3, 3, (0,)) if given.smoke else Settings(seeds=tuple(given.seeds))
    before = json.loads(given.output.read_text()) if given.output.exists() and not given.smoke else {}
    report: dict[str, Any] = {part: before[part] for part in ("idle", "loss") if part in before}
    tables: dict[str, list[str]] = {}
    if given.part in (None, "idle"):
        report["idle"] = measure_idle(settings)
        tables["idle"] = idle_table(report["idle"])
    if given.part in (None, "loss"):
        report["loss"] = joined(before.get("loss", []), measure_loss(settings))
        tables["loss"] = loss_table(report["loss"])
    for lines in tables.values():
        Console(width=140, highlight=False).print("\n".join(lines), markup=False)
    write_report(given.output, report)
    if not given.smoke:
        if given.part in (None, "picture"):
            draw()
        PAGE.write_text(with_tables(PAGE.read_text(), tables))


if __name__ == "__main__":
    main()
