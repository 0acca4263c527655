"""Step times of a small Llama on CPU ranks, against what the planner predicts from a calibration of this machine.

Both sides take the least of several: what others do on the machine disturbs a measurement and never hastens it. The blocks that
are calibrated are the model's own, and each layout is compared with a calibration of as many ranks, made next to it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.dry_run.rank.step import Training, batches_of
from hf_parallel.engine.session import Session
from hf_parallel.memory.meter import Meter
from hf_parallel.memory.terms import Work
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.planner.calibrate import Calibration, calibrate
from hf_parallel.planner.measured import MeasuredCluster
from hf_parallel.planner.predict import predict
from hf_parallel.settings.config import HFParallelConfig


SIZES: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 2048, "max_position_embeddings": 512,
}  # fmt: skip
LENGTH, STEPS = 128, 12  # short steps: some of them are not disturbed
# Settings, layout and rows of a batch of each replica; 8 rows of an optimizer step.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "dp2": ({}, {"dp": 2, "micro_batch": 4}, 4),
    "tp2": ({"tp_size": 2}, {"tp": 2, "micro_batch": 8}, 8),
    "pp2": (
        {"pp_size": 2, "pipeline": {"num_microbatches": 4}}, {"pp": 2, "micro_batch": 2, "num_microbatches": 4}, 8,
    ),
    "zero1": ({"zero": {"stage": 1}}, {"dp": 2, "zero": 1, "micro_batch": 4}, 4),
    "pp2 dp2": (
        {"pp_size": 2, "pipeline": {"num_microbatches": 4}},
        {"pp": 2, "dp": 2, "micro_batch": 1, "num_microbatches": 4},
        4,
    ),
}  # fmt: skip


def rank_main(rank: int, ranks: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
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
    Path(folder, f"{rank}.json").write_text(json.dumps(min(times[1:])))


def ranks_of(name: str) -> int:
    layout = LAYOUTS[name][1]
    return int(layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1))


def measured(name: str) -> float:
    """Seconds of an optimizer step."""
    ranks = ranks_of(name)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=rank_main, args=(rank, ranks, name, folder)) for rank in range(ranks)]
        for one in started:
            one.start()
        for one in started:
            one.join()
        return float(json.loads(Path(folder, "0.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("build/reports/bench-calibration.json"))
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS))
    arguments = parser.parse_args()
    model, rows, report = LlamaConfig(**SIZES), [], {}
    found: dict[int, Calibration] = {}
    for name in arguments.only:
        layout, ranks = LAYOUTS[name][1] | {"dtype": "fp32"}, ranks_of(name)
        if ranks not in found:
            found[ranks] = calibrate(ranks, on_gpu=False, model=json.dumps(model.to_dict()), length=LENGTH)
        cluster = MeasuredCluster(1, ranks, "cpu", calibration=found[ranks])
        predicted, seconds = predict(model, cluster, layout, seq_len=LENGTH).step_s, measured(name)
        report[name] = {"predicted_s": predicted, "measured_s": seconds}
        rows.append((name, predicted, seconds))
        sys.stdout.write(
            f"{name:8s} predicted {predicted:.3f} s, measured {seconds:.3f} s: {predicted / seconds - 1:+.0%}\n"
        )
        sys.stdout.flush()
    orders = [[name for name, *_ in sorted(rows, key=lambda row: row[place])] for place in (1, 2)]
    sys.stdout.write(f"order predicted {orders[0]}, measured {orders[1]}\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    content = {"calibrations": {ranks: asdict(one) for ranks, one in found.items()}, "layouts": report}
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
