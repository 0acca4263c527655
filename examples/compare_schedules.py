"""Compare pipeline schedules: by the simulator before anything runs, and measured on the ranks of a launch.

    python examples/compare_schedules.py --pp 4 --microbatches 8
    accelerate launch --config_file recipes/cpu_pp2.yaml examples/compare_schedules.py --run naive 1f1b --demo
    accelerate launch --config_file RECIPE.yaml examples/compare_schedules.py --run 1f1b zbv_zero_bubble \
        --model_name_or_path meta-llama/Llama-2-7b-hf --rows 16 --block_size 2048

Simulated times are in units of a forward of one microbatch through a rank's share of the model; a backward takes two. With
`--run` one model is trained under each of the schedules from the same weights, on as many ranks and microbatches as the recipe
says: all give the same losses, and the table has both times, which compare if nothing else uses the machine. `hf-parallel
schedule` draws schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import demo
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_parallel import HFParallelCallback  # before TrainingArguments are made: it prepares a launched CPU process


SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


class Clock(TrainerCallback):
    """How long steps take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *arguments: Any, **kwargs: Any) -> None:
        """Start."""
        self.began = time.perf_counter()

    def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self.began)


def parse_arguments() -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(description="Compare pipeline schedules.")
    parser.add_argument("--pp", type=int, default=4, help="ranks of the simulated pipeline")
    parser.add_argument("--microbatches", type=int, default=8, help="its microbatches")
    parser.add_argument("--run", nargs="+", metavar="SCHEDULE", help="train under these; needs a launcher")
    parser.add_argument("--model_name_or_path", help="name on the hub, or a directory")
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--block_size", type=int, default=256, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps under each schedule")
    parser.add_argument("--output_dir", default="build/demo_schedules")
    parser.add_argument("--demo", action="store_true", help="a small model with random weights")
    arguments = parser.parse_args()
    if arguments.run and "LOCAL_RANK" not in os.environ:
        parser.error(
            "--run needs ranks: accelerate launch --config_file recipes/cpu_pp2.yaml examples/compare_schedules.py ..."
        )
    if arguments.run and not (arguments.demo or arguments.model_name_or_path):
        parser.error("--run needs a model: give --model_name_or_path, or --demo")
    return arguments


def simulate(names: list[str] | tuple[str, ...], pp: int, microbatches: int) -> dict[str, dict[str, Any]]:
    """Schedule -> its figures, as `hf-parallel schedule --json` prints them."""
    command = [sys.executable, "-m", "hf_parallel", "schedule", "--json"]
    command += ["--pp", str(pp), "--microbatches", str(microbatches)]
    for name in names:
        command += ["--schedule", name]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {row["schedule"]: row for row in facts}


def show(found: dict[str, dict[str, Any]], measured: dict[str, float]) -> None:
    """Print a line for each schedule."""
    one = next(iter(found.values()))
    print(f"{one['pp']} ranks, {one['microbatches']} microbatches")
    print(f"{'schedule':24} {'step':>6} {'idle':>6}  {'measured':>8}  microbatches held by each rank")
    for name, row in found.items():
        held = " ".join(f"{peak:g}" for peak in row["peak_activations"])
        taken = f"{1e3 * measured[name]:.0f} ms" if name in measured else ""
        print(f"{name:24} {row['step_time']:6.1f} {row['bubble_fraction']:6.1%}  {taken:>8}  {held}", flush=True)


def train(arguments: argparse.Namespace, schedule: str) -> tuple[float, list[float], Any]:
    """Train under `schedule`; returns the seconds of a step, the losses and the settings."""
    set_seed(0)
    load = AutoModelForCausalLM.from_pretrained
    model = demo.model() if arguments.demo else load(arguments.model_name_or_path)
    size, count = arguments.block_size, arguments.rows * arguments.steps
    text = "".join(demo.texts()).encode() * (1 + count * size // 100_000)
    blocks = [list(text[at * size : (at + 1) * size]) for at in range(count)]
    parallel, clock = HFParallelCallback(schedule=schedule), Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.rows,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": blocks, "labels": blocks}),
        data_collator=default_data_collator,
        callbacks=[parallel, clock],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return statistics.median(clock.seconds[1:]), losses, parallel.config


def main() -> None:
    """Simulate; with --run train, too."""
    arguments = parse_arguments()
    if not arguments.run:
        show(simulate(SCHEDULES, arguments.pp, arguments.microbatches), {})
        return
    seconds, losses = {}, {}
    for name in arguments.run:
        taken, curve, config = train(arguments, name)
        seconds[config.pipeline.schedule], losses[config.pipeline.schedule] = taken, curve
    if os.environ["RANK"] == "0":
        show(simulate(list(seconds), config.pp_size, config.pipeline.num_microbatches), seconds)
        for name, curve in losses.items():
            print(f"{name:24} train loss {curve[0]:.6f} -> {curve[-1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
