"""Step times of a small Llama on CPU ranks, against what the planner predicts from a calibration of this machine.

`make bench-calibration` takes about four minutes on a machine with nothing else to do, and ends after eight in any
case. It prints a line for each layout, the mean and the largest error, and the order of the layouts by both times. Each layout is
launched twice, the second time after all others: what the two differ by is what a measured order cannot tell apart.
Both sides take the least of several: what others do on the machine disturbs a measurement and never hastens it. The blocks that
are calibrated are the model's own, and each layout is compared with a calibration of as many ranks, made next to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
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
from hf_parallel.planner.processes import run_ranks, step_file
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
    "pp2xdp2": (
        {"pp_size": 2, "pipeline": {"num_microbatches": 4}},
        {"pp": 2, "dp": 2, "micro_batch": 1, "num_microbatches": 4},
        4,
    ),
    "zero1": ({"zero": {"stage": 1}}, {"dp": 2, "zero": 1, "micro_batch": 4}, 4),
}  # fmt: skip
USUAL = ("pp2", "tp2", "dp2", "pp2xdp2")
LIMIT_S = 60.0  # of the ranks of a layout: 13 steps, and what they import


def rank_main(rank: int, ranks: int, name: str, folder: str) -> None:
    step = step_file(Path(folder), rank)
    step.write_text("waited for the other ranks")
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
    for index in range(STEPS + 1):
        step.write_text(f"ran step {index} of {STEPS}")
        dist.barrier()
        begun = time.perf_counter()
        training.step(batches)
        dist.barrier()
        times.append(time.perf_counter() - begun)
    step.write_text("stopped")
    session.watchdog.stop()
    Path(folder, f"{rank}.json").write_text(json.dumps(min(times[1:])))


def ranks_of(name: str) -> int:
    layout = LAYOUTS[name][1]
    return int(layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1))


def measured(name: str) -> float:
    """Seconds of an optimizer step."""
    ranks = ranks_of(name)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, rank_main, (ranks, name, folder), Path(folder), LIMIT_S)
        return float(json.loads(Path(folder, "0.json").read_text()))


@dataclass(frozen=True)
class Times:
    """Seconds of a layout: predicted, and those of each launch."""

    predicted: float
    launches: tuple[float, ...]

    @property
    def measured(self) -> float:
        return min(self.launches)

    @property
    def spread(self) -> float:
        """By which part of the least the launches differ."""
        return max(self.launches) / self.measured - 1

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compared(names: list[str]) -> tuple[dict[str, Times], dict[int, Calibration]]:
    """Seconds of each layout, and the calibration for each number of ranks."""
    model, times = LlamaConfig(**SIZES), {}
    found: dict[int, Calibration] = {}
    for name in names:
        layout, ranks = LAYOUTS[name][1] | {"dtype": "fp32"}, ranks_of(name)
        if ranks not in found:
            found[ranks] = calibrate(ranks, on_gpu=False, model=json.dumps(model.to_dict()), length=LENGTH)
        cluster = MeasuredCluster(1, ranks, "cpu", calibration=found[ranks])
        predicted = predict(model, cluster, layout, seq_len=LENGTH).step_s
        times[name] = Times(predicted, (measured(name),))
    for name in names:
        one = times[name] = Times(times[name].predicted, (*times[name].launches, measured(name)))
        say(
            f"{name:8s} predicted {one.predicted:.3f} s, measured {one.measured:.3f} s: {one.error:+.0%} (launches {one.spread:.0%} apart)"
        )
    return times, found


def pairs_of(times: dict[str, Times], spread: float) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs of layouts whose measured times differ by more than a part, the faster first; those of them predicted otherwise."""
    pairs = itertools.permutations(times, 2)
    told = [(a, b) for a, b in pairs if times[b].measured > (1 + spread) * times[a].measured]
    return told, [(a, b) for a, b in told if times[a].predicted > times[b].predicted]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/reports/bench-calibration.json"))
    parser.add_argument("--only", nargs="*", default=list(USUAL), choices=list(LAYOUTS), help="layouts to compare")
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    say(f"{os.cpu_count()} cores, load {busy:.1f} before it began{': not a quiet machine' if busy > 1 else ''}")
    times, found = compared(arguments.only)
    errors = [abs(one.error) for one in times.values()]
    say(f"error: mean {sum(errors) / len(errors):.0%}, largest {max(errors):.0%} (wanted: at most 15 % each)")
    predicted = sorted(times, key=lambda name: times[name].predicted)
    in_order = sorted(times, key=lambda name: times[name].measured)
    spread = max(one.spread for one in times.values())
    told, wrong = pairs_of(times, spread)
    say(f"order: predicted {' < '.join(predicted)}; measured {' < '.join(in_order)}")
    say(
        f"{len(told)} of {math.comb(len(times), 2)} pairs of layouts are further apart than launches of one ({spread:.0%}); predicted in "
        f"the other order: {', '.join(map(' and '.join, wrong)) or 'none'}"
    )
    content = {
        "cores": os.cpu_count(),
        "load_before": busy,
        "calibrations": {ranks: asdict(one) for ranks, one in found.items()},
        "layouts": {name: {"predicted_s": one.predicted, "launches_s": one.launches} for name, one in times.items()},
        "orders": {"predicted": predicted, "measured": in_order, "apart": told, "wrong": wrong},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
