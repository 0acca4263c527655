"""Step times of a small Llama on two CPU ranks, against what the planner predicts from a calibration of this machine."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.dry_run.memory.terms import Work
from hf_parallel.dry_run.rank.meter import Meter
from hf_parallel.dry_run.rank.step import Training, batches_of
from hf_parallel.engine.session import Session
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.planner.calibrate import Calibration, calibrate
from hf_parallel.planner.measured import MeasuredCluster
from hf_parallel.planner.predict import predict
from hf_parallel.settings.config import HFParallelConfig


SIZES: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
ROWS, LENGTH, STEPS = 8, 256, 5  # rows of an optimizer step
# Settings, layout and rows of a batch of each replica.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "dp2": ({}, {"dp": 2, "micro_batch": 4}, 4),
    "tp2": ({"tp_size": 2}, {"tp": 2, "micro_batch": 8}, 8),
    "pp2": (
        {"pp_size": 2, "pipeline": {"num_microbatches": 4}}, {"pp": 2, "micro_batch": 2, "num_microbatches": 4}, 8,
    ),
    "zero1": ({"zero": {"stage": 1}}, {"dp": 2, "zero": 1, "micro_batch": 4}, 4),
}  # fmt: skip


def rank_main(rank: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    settings, _, rows = LAYOUTS[name]
    config = HFParallelConfig.from_mapping(settings)
    session = Session.start(config, ScheduleChoice(config.pipeline, config.pp_size), "a benchmark")
    torch.manual_seed(0)
    engine = session.attach(LlamaForCausalLM(LlamaConfig(**SIZES)).train(), torch.device("cpu"))
    training = Training.of(engine, Meter("none", str))
    batches = batches_of(Work(rows, LENGTH), mask=False, new=lambda shape, dtype: torch.ones(shape, dtype=dtype))
    times = []
    for _ in range(STEPS + 1):
        dist.barrier()
        begun = time.perf_counter()
        training.step(batches)
        dist.barrier()
        times.append(time.perf_counter() - begun)
    session.watchdog.stop()
    Path(folder, f"{rank}.json").write_text(json.dumps(statistics.median(times[1:])))


def measured(name: str) -> float:
    """Seconds of an optimizer step."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=rank_main, args=(rank, name, folder)) for rank in range(2)]
        for one in started:
            one.start()
        for one in started:
            one.join()
        return float(json.loads(Path(folder, "0.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, help="a report of hf-parallel calibrate; measured if not given")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS))
    arguments = parser.parse_args()
    found = Calibration.read(arguments.report) if arguments.report else calibrate(2, on_gpu=False)
    sys.stdout.write(f"{found}\n")
    cluster = MeasuredCluster(1, 2, "cpu", calibration=found)
    rows = []
    for name in arguments.only:
        layout = LAYOUTS[name][1] | {"dtype": "fp32"}
        predicted, seconds = predict(LlamaConfig(**SIZES), cluster, layout, seq_len=LENGTH).step_s, measured(name)
        rows.append((name, predicted, seconds))
        sys.stdout.write(
            f"{name:8s} predicted {predicted:.3f} s, measured {seconds:.3f} s: {predicted / seconds - 1:+.0%}\n"
        )
        sys.stdout.flush()
    orders = [[name for name, *_ in sorted(rows, key=lambda row: row[place])] for place in (1, 2)]
    sys.stdout.write(f"order predicted {orders[0]}, measured {orders[1]}\n")


if __name__ == "__main__":
    main()
