"""How long a model takes from `Trainer` to the first step: the plan, the comparison with the whole model, and the cut.

    python benchmarks/bench_attach.py            # a quarter of an hour
    python benchmarks/bench_attach.py --smoke    # a small model; its numbers mean nothing

A Llama of the shape of SmolLM2-135M, one twice as wide, and one twice as deep, with random weights, on two gloo ranks with one
thread each: for the first time (nothing is remembered), again, and with `self_check: full`, which compares the model itself.
Packages are imported before, weights are made before. Each is the median of fresh processes, and the slower rank's time.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from timing import ROUNDS_HEAD, Load, foreign_cores, parser_of, rounds_and_load, write_report
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.engine.plan.verdicts import FOLDER_VARIABLE
from hf_parallel.engine.session import Session
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.planner.processes import run_ranks, step_file
from hf_parallel.settings.config import HFParallelConfig


SMOLLM2: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
WIDE = {**SMOLLM2, "hidden_size": 1152, "intermediate_size": 3072, "num_attention_heads": 18, "num_key_value_heads": 6}
MODELS = {"SmolLM2-135M": SMOLLM2, "twice as wide": WIDE, "twice as deep": {**SMOLLM2, "num_hidden_layers": 60}}
TINY = {**SMOLLM2, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
FULL = {"self_check": "full"}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings, and what `full` adds
    "pp2": ({"pp_size": 2}, {"pipeline": FULL}),
    "tp2": ({"tp_size": 2}, {"tensor_parallel": FULL}),
}
TIMES = ("first", "again", "full")
LIMIT_S = 300.0


def rank_main(rank: int, sizes: dict[str, Any], settings: dict[str, Any], remembered: str, folder: str) -> None:
    """One rank of a start: seconds of `attach`, and the cores that other processes used meanwhile, into a file."""
    step = step_file(Path(folder), rank)
    step.write_text("waited for the other rank")
    os.environ[FOLDER_VARIABLE] = remembered
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    config = HFParallelConfig.from_mapping(settings)
    session = Session.start(config, ScheduleChoice(config.pipeline, config.pp_size), "a benchmark")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
    step.write_text("attached the model")
    dist.barrier()
    load = Load()
    session.attach(model, torch.device("cpu"))
    dist.barrier()
    seconds, own, busy = load.spent()
    cpu: list[float] = [0.0, 0.0]
    dist.all_gather_object(cpu, own)
    session.watchdog.stop()
    Path(folder, f"{rank}.json").write_text(json.dumps([seconds, foreign_cores(seconds, sum(cpu), busy)]))


def measured(sizes: dict[str, Any], settings: dict[str, Any], remembered: Path) -> tuple[float, float]:
    """Seconds of a start, and the cores that other processes used meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, rank_main, (sizes, settings, str(remembered), folder), Path(folder), LIMIT_S)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    return max(seconds for seconds, _ in found), max(foreign for _, foreign in found)


def row_of(name: str, sizes: dict[str, Any], layout: str, rounds: int) -> dict[str, Any]:
    """The times of a model on a layout."""
    usual, full = LAYOUTS[layout]
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in TIMES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as remembered:
            for kind in TIMES:
                settings = usual | full if kind == "full" else usual
                found[kind].append(measured(sizes, settings, Path(remembered)))
    return {
        "model": name,
        "layout": layout,
        "parameters": sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**sizes)).parameters()),
        "seconds": {kind: statistics.median(seconds for seconds, _ in times) for kind, times in found.items()},
        "spread": {kind: [min(times)[0], max(times)[0]] for kind, times in found.items()},
        "foreign_cores": statistics.median(foreign for times in found.values() for _, foreign in times),
        "rounds": rounds,
    }


def main() -> None:
    """Measure, print the table and write the report."""
    given = parser_of(__doc__, "build/reports/bench-attach.json").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    models = {"tiny": TINY} if given.smoke else MODELS
    rounds = given.rounds or (1 if given.smoke else 3)
    rows = [row_of(name, sizes, layout, rounds) for name, sizes in models.items() for layout in LAYOUTS]
    table = Table(
        "model", "1e6 parameters", "layout", "first s (least .. most)", "again s", "self_check: full s", ROUNDS_HEAD
    )
    for row in rows:
        seconds, (low, high) = row["seconds"], row["spread"]["first"]
        table.add_row(
            *(row["model"], f"{row['parameters'] / 1e6:.0f}", row["layout"]),
            f"{seconds['first']:.1f} ({low:.1f} .. {high:.1f})",
            *(f"{seconds['again']:.1f}", f"{seconds['full']:.1f}", rounds_and_load(row)),
        )
    Console(width=120).print(table)
    write_report(given.output, {"rows": rows, "memory_gb": psutil.virtual_memory().total / 1e9})


if __name__ == "__main__":
    main()
