"""Train over a slow network: the same steps with exact gradients, with gradients in 8 bits, and with local steps.

    accelerate launch --config_file recipes/cpu_dp2.yaml examples/slow_network.py --demo
    accelerate launch --config_file RECIPE.yaml examples/slow_network.py \
        --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file data.jsonl --block_size 1024 --max_steps 80 \
        --link_gbit_s 1 --output_dir runs/slow

The recipe needs two replicas or more. The table has what a rank sent (by the formulas of the collectives; a ring all-reduce where
nothing is compressed), how long that takes on a network of `--link_gbit_s`, and the losses: those of all replicas' rows at the
first step and over the last quarter of the steps. A run of your own sets the same keys in its recipe, as `cpu_dp2_int8` and
`cpu_dp2_local8` do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import demo
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_parallel import HFParallelCallback  # before TrainingArguments are made: it prepares a launched CPU process


DEMO_DEFAULTS: dict[str, Any] = {"block_size": 64, "batch_size": 4, "max_steps": 24, "learning_rate": 1e-3}
INT8 = {"method": "int8"}
RUNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"gradient_compression": INT8},
    "local8": {"local_sgd": {"sync_every": 8, "compression": INT8}},
}


def parse_arguments() -> argparse.Namespace:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = argparse.ArgumentParser(description="Compare what replicas send, and what it does to the loss.")
    parser.add_argument("--model_name_or_path", help="name on the hub, or a directory")
    parser.add_argument("--train_file", help="JSON lines with a text")
    parser.add_argument("--output_dir", default="build/demo_slow")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a replica")
    parser.add_argument("--max_steps", type=int, default=80, help="optimizer steps of each run, a multiple of 8")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--link_gbit_s", type=float, default=1.0, help="of the network between replicas")
    parser.add_argument("--demo", action="store_true", help="small model, small data, few steps: defaults for a CPU")
    if parser.parse_known_args()[0].demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    arguments = parser.parse_args()
    if not arguments.demo and None in (arguments.model_name_or_path, arguments.train_file):
        parser.error("give --model_name_or_path and --train_file, or --demo")
    if arguments.max_steps % 8:
        parser.error(f"--max_steps {arguments.max_steps}: give a multiple of 8, the steps between two exchanges")
    return arguments


def load(arguments: argparse.Namespace) -> tuple[Any, Dataset]:
    """Return the model and the blocks of tokens."""
    if arguments.demo:
        model, tokenizer, texts = demo.model(), demo.tokenizer(), demo.texts()
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
        lines = Path(arguments.train_file).read_text(encoding="utf-8").splitlines()
        texts = [str(json.loads(line)["text"]) for line in lines if line.strip()]
    tokens = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    size = arguments.block_size
    blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    return model, Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def train(arguments: argparse.Namespace, settings: dict[str, Any]) -> tuple[float, list[float], bool]:
    """Train with `settings` over those of the recipe; returns MB sent by a rank, the losses, and whether this is rank 0."""
    set_seed(0)
    model, rows = load(arguments)
    parallel = HFParallelCallback(**settings)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.max_steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[parallel],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    replicas = trainer.args.world_size // parallel.config.model_parallel_size
    whole = 2 * (replicas - 1) / replicas * sum(p.nbytes for p in model.parameters() if p.requires_grad) / 1e6
    sent = sum(entry.get("compression/wire_mb", whole) for entry in logs)
    return sent, [entry["loss"] for entry in logs], trainer.is_world_process_zero()


def main() -> None:
    """Train once with each of the settings."""
    arguments = parse_arguments()
    results = {name: train(arguments, settings) for name, settings in RUNS.items()}
    if not results["exact"][2]:
        return
    print(f"{arguments.max_steps} steps   MB sent   of exact  s on {arguments.link_gbit_s:g} Gbit/s   train loss")
    for name, (sent, losses, _) in results.items():
        last = losses[-max(1, len(losses) // 4) :]
        share, seconds = sent / results["exact"][0], 8e-3 * sent / arguments.link_gbit_s
        curve = f"{losses[0]:.4f} -> {sum(last) / len(last):.4f}"
        print(f"{name:9} {sent:9.2f} {share:9.1%} {seconds:15.2f}   {curve}", flush=True)


if __name__ == "__main__":
    main()
