"""Bytes and seconds of an optimizer step in every order of the axes, on nodes that are joined by a slow network.

    python benchmarks/bench_topology.py            # some ten minutes; needs root and iproute2, or says why it is skipped
    python benchmarks/bench_topology.py --smoke    # a minute; checks that everything runs, its times mean nothing

The network is the kernel's: two namespaces with shaped links (see slow_network.py) and two ranks in each, trained by a stock
Trainer. A wide model with short rows sends more gradients than activations, a narrow one with long rows the other way around,
and of four replicas the sum crosses the network in one ring, or after a sum inside each node. `auto` gives no order.

`planned` is what the start-up map says that a node sends, `counted` what its network card sent, headers included. `bound` is
the counted bytes over the rate of the link + the step on a network a hundred times as fast. Of each case the slowest order over
the one that `auto` took is compared with the same of the bounds. Exits with 1 if bytes miss what was planned, or if `auto` took
another order than the one with fewest bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results_page import markdown_table, write_section
from rich.console import Console
from rich.table import Table
from slow_network import SlowNetwork, exit_on_signals, run_ranks_on, sent
from timing import llama_config, parser_of, shuffled, write_report


NODES, RANKS = 2, 4
PP2 = {"pp_size": 2, "pipeline": {"num_microbatches": 2, "self_check": "off"}}
AUTO = "auto"
CONTROL_MB = 0.05  # of a step: counts of tokens, losses, digests, norms, acknowledgements


@dataclass(frozen=True)
class Case:
    """A model, and the settings that are compared on it.

    Attributes:
        hidden: Width.
        length: Tokens of a row.
        rows: Of a replica's batch.
        ways: Name -> settings; `auto` is compared with the others.
        table: Tokens of a vocabulary whose embedding is the head, too; 0: two tables of 256.
    """

    hidden: int
    length: int
    rows: int
    ways: Mapping[str, Mapping[str, Any]]
    table: int = 0


def orders() -> dict[str, dict[str, Any]]:
    """Both orders of stages and replicas, and none given."""
    given: dict[str, dict[str, Any]] = {
        "stages inside": {"dp_inside": 1},
        "replicas inside": {"dp_inside": 2},
        AUTO: {},
    }
    return {name: PP2 | {"topology": topology} for name, topology in given.items()}


CASES = {
    "pp 2 x dp 2, wide model": Case(256, 32, 4, orders()),
    "pp 2 x dp 2, long rows": Case(64, 768, 8, orders()),
    "pp 2 x dp 2, tied table": Case(128, 32, 4, orders(), table=8192),
    "dp 4": Case(
        256, 32, 4, {"one ring": {"topology": {"reduction": "flat"}}, AUTO: {}}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    megabits: float = 50.0
    fast: float = 100.0  # times as many on the network that is no obstacle
    rounds: int = 3
    steps: int = 3
    warmup: int = 2
    shrink: int = 1  # of widths and lengths
    blocks: int = 4
    seconds: float = 900.0


def train(case: Case, way: Mapping[str, Any], settings: Settings, folder: str) -> dict[str, Any]:
    """Train some steps; seconds and bytes of a step on this rank's node, what the map says, the order that was taken."""
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from hf_parallel import HFParallelCallback

    hidden, length = case.hidden // settings.shrink, case.length // settings.shrink
    torch.manual_seed(0)
    config = llama_config(hidden, settings.blocks, case.table // settings.shrink or 256, length)
    config.tie_word_embeddings = bool(case.table)
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, 256, (case.rows * RANKS * (settings.steps + settings.warmup), length))
    marks: list[tuple[float, int]] = []

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (settings.warmup, settings.warmup + settings.steps):
                dist.barrier()
                marks.append((time.perf_counter(), sent()[0]))

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=case.rows, max_steps=settings.warmup + settings.steps, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no", max_grad_norm=0.0, dataloader_pin_memory=False,
    )  # fmt: skip
    settings_of_run: dict[str, Any] = {"monitor": {"metrics": False}, **way}
    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[HFParallelCallback({}, **settings_of_run), Marks()],
    )  # fmt: skip
    placement = trainer.accelerator.hf_parallel.placement
    trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    (start, before), (end, after) = marks
    return {
        "seconds": (end - start) / settings.steps,
        "counted": (after - before) / settings.steps,
        "planned": placement.cost[0],
        "order": [placement.shape.dp_inside, placement.sums_in_nodes],
    }


def worker(settings: Settings, output: Path) -> None:
    """One rank: all cases and ways in changing order; each node's first rank writes what it saw."""
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for number in range(settings.rounds):
        for name, case in CASES.items():
            for way in shuffled(list(case.ways), number):
                with tempfile.TemporaryDirectory() as folder:
                    row = train(case, case.ways[way], settings, folder)
                found.append({"case": name, "way": way, "round": number, **row})
    if os.environ["LOCAL_RANK"] == "0":
        (output / f"node{dist.get_rank() // (RANKS // NODES)}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(megabits: float, settings: Settings) -> list[dict[str, Any]]:
    """Build the network, run the ranks, take it down; samples with the bytes of the node that sent more."""
    with tempfile.TemporaryDirectory() as name, SlowNetwork(NODES, megabits) as network:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", "all", "--output", name]
        run_ranks_on(network, RANKS // NODES, command, folder, settings.seconds)
        nodes = [json.loads((folder / f"node{node}.json").read_text()) for node in range(NODES)]
    return [
        one | {"counted": max(one["counted"], other["counted"]), "seconds": max(one["seconds"], other["seconds"])}
        for one, other in zip(*nodes, strict=True)
    ]


def rows_of(
    slow: Sequence[Mapping[str, Any]], fast: Sequence[Mapping[str, Any]], settings: Settings
) -> list[dict[str, Any]]:
    """One row a way: medians over the rounds."""
    rows = []
    for name, case in CASES.items():
        for way in case.ways:
            own, others = (
                [one for one in samples if (one["case"], one["way"]) == (name, way)] for samples in (slow, fast)
            )
            counted, seconds = (statistics.median(one[key] for one in own) for key in ("counted", "seconds"))
            alone, limit = statistics.median(one["seconds"] for one in others), counted * 8e-6 / settings.megabits
            rows.append({
                "case": name, "way": way, "order": own[0]["order"], "planned_mb": own[0]["planned"] / 1e6,
                "counted_mb": counted / 1e6, "limit_seconds": limit, "seconds": seconds, "fast_seconds": alone,
                "bound_seconds": limit + alone,
            })  # fmt: skip
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool, bool]]:
    """What was asked, whether it was met, and whether it is of bytes, which no load excuses."""
    found = []
    for name in CASES:
        own = {row["way"]: row for row in rows if row["case"] == name}
        auto, given = own[AUTO], {way: row for way, row in own.items() if way != AUTO}
        best = min([*given.values(), auto], key=lambda row: row["planned_mb"])
        worst = max(given.values(), key=lambda row: row["planned_mb"])
        found.append(
            (f"{name}: auto takes the order with fewest bytes", auto["planned_mb"] == best["planned_mb"], True)
        )
        for row in own.values():
            over, allowed = row["counted_mb"] - row["planned_mb"], 0.1 * row["planned_mb"] + CONTROL_MB
            text = f"{name}, {row['way']}: {over:+.2f} MB to what the map says, asked at most {allowed:+.2f}"
            found.append((text, -0.02 * row["planned_mb"] <= over <= allowed, True))
        ratio, asked = worst["seconds"] / auto["seconds"], worst["bound_seconds"] / auto["bound_seconds"]
        text = f"{name}: {worst['way']} takes {ratio:.2f}x as long as auto, by the bytes {asked:.2f}x, asked 0.8 of it"
        found.append((text, ratio >= 0.8 * asked, False))
    return found


HEAD = ("order", "planned MB", "counted MB", "limit s", "step s", "fast net s", "bound s")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    numbers = ("limit_seconds", "seconds", "fast_seconds", "bound_seconds")
    return (
        *(row["way"], f"{row['planned_mb']:.2f}", f"{row['counted_mb']:.2f}"),
        *(f"{row[number]:.2f}" for number in numbers),
    )


def section(rows: Sequence[Mapping[str, Any]], asked: Sequence[tuple[str, bool, bool]], settings: Settings) -> str:
    """The section of the page: a table for each case, and what was asked."""
    parts = [
        f"2 nodes of 2 ranks, {settings.megabits:g} Mbit/s a node, medians of {settings.rounds} rounds of {settings.steps} steps; the ranks "
        f"share {os.cpu_count()} cores, so what they compute takes its time, too."
    ]
    for name in CASES:
        parts.append(f"{name}:\n\n{markdown_table(HEAD, [cells(row) for row in rows if row['case'] == name])}")
    return "\n\n".join([*parts, "\n".join(f"- {'met' if met else 'NOT MET'}: {text}" for text, met, _ in asked)])


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """Return what was given, and the settings."""
    parser = parser_of(__doc__, "build/reports/bench-topology.json")
    parser.add_argument("--megabits", type=float, default=Settings.megabits, help="Mbit/s of each link and direction")
    parser.add_argument("--page", type=Path, help="page whose section is rewritten")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        return given, Settings(megabits=200.0, rounds=1, steps=1, warmup=1, shrink=4, blocks=2, seconds=400.0)
    return given, Settings(megabits=given.megabits, rounds=given.rounds or Settings.rounds)


def main() -> None:
    """Measure every case, print the tables and what was asked, and write the report."""
    given, settings = parse_arguments()
    if given.rank_of is not None:
        worker(Settings(**json.loads((given.output / "settings.json").read_text())), given.output)
        return
    exit_on_signals()
    console = Console(width=120)
    obstacle = SlowNetwork.obstacle()
    if obstacle is not None:
        console.print(f"skipped: {obstacle}")
        write_report(given.output, {"skipped": obstacle})
        return
    slow = measure(settings.megabits, settings)
    fast = measure(settings.megabits * settings.fast, settings)
    rows = rows_of(slow, fast, settings)
    for name in CASES:
        table = Table(title=name)
        for head in HEAD:
            table.add_column(head, justify="left" if head == HEAD[0] else "right")
        for row in rows:
            if row["case"] == name:
                table.add_row(*cells(row))
        console.print(table)
    asked = [] if given.smoke else verdicts(rows)
    for text, met, _ in asked:
        console.print(f"{'met' if met else 'MISSED'}: {text}")
    write_report(
        given.output, {"rows": rows, "asked": asked, "samples": slow, "fast": fast, "settings": asdict(settings)}
    )
    if given.page is not None:
        write_section(given.page, "topology", section(rows, asked, settings))
    if any(of_bytes and not met for _, met, of_bytes in asked):
        sys.exit(1)


if __name__ == "__main__":
    main()
