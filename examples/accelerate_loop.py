"""A training loop of accelerate, unchanged but for one line, on replicas, ZeRO, pipeline stages or shards.

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/accelerate_loop.py --demo
    accelerate launch --config_file RECIPE.yaml examples/accelerate_loop.py \
        --model_name_or_path meta-llama/Llama-2-7b-hf --train_file data.jsonl --block_size 2048 \
        --output_dir runs/loop --batch_size 8 --accumulate 4 --max_steps 1000

The line is `Accelerator(parallelism_config=HFParallelPlugin())`. `--train_file` has one JSON object with a `text` a line. The
state is saved at half of the steps; `--resume` goes on from it, also under another layout. The demo goes back to that state
when it has ended, takes the same steps again and compares their losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

from hf_parallel import HFParallelPlugin  # before the Accelerator is made: it prepares a launched CPU process


DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "build/demo_loop",
    "block_size": 64,
    "batch_size": 8,
    "max_steps": 8,
    "learning_rate": 3e-3,
}


def parse_arguments() -> argparse.Namespace:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model in a loop of accelerate.")
    parser.add_argument("--model_name_or_path", help="name on the hub, or a directory")
    parser.add_argument("--train_file", help="JSON lines with a text")
    parser.add_argument("--output_dir", default="runs/loop")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a model copy")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of an optimizer step")
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--resume", action="store_true", help="go on from the state in output_dir")
    parser.add_argument("--demo", action="store_true", help="small model, small data, few steps: defaults for a CPU")
    if parser.parse_known_args()[0].demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    arguments = parser.parse_args()
    if not arguments.demo and None in (arguments.model_name_or_path, arguments.train_file):
        parser.error("give --model_name_or_path and --train_file, or --demo")
    return arguments


def load(arguments: argparse.Namespace) -> tuple[Any, list[dict[str, list[int]]]]:
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
    return model, [{"input_ids": block, "labels": block} for block in blocks]


def main() -> None:
    """Load, train, save."""
    arguments = parse_arguments()
    state = Path(arguments.output_dir) / "state"
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=arguments.accumulate,
        step_scheduler_with_optimizer=False,  # else a schedule counts replicas, and another number of them is another rate
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True
        ),  # an epoch's order follows from its number
        parallelism_config=HFParallelPlugin(),  # the line
    )
    model, rows = load(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.1)
    loader = DataLoader(rows, arguments.batch_size, shuffle=True, drop_last=True, collate_fn=default_data_collator)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=arguments.max_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()

    def batches(first: int) -> Iterator[Any]:
        """Batches from number `first` on, through as many epochs as it takes."""
        for epoch in itertools.count(first // len(loader)):
            loader.set_epoch(epoch)
            skipped = first % len(loader) if epoch == first // len(loader) else 0
            yield from accelerator.skip_first_batches(loader, skipped) if skipped else loader

    def train(first: int, last: int) -> list[float]:
        """Take optimizer steps `first` to `last`; returns their losses."""
        losses, parts = [], []
        for batch in itertools.islice(batches(first * arguments.accumulate), (last - first) * arguments.accumulate):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            parts.append(loss.detach())
            if accelerator.sync_gradients:
                losses.append(accelerator.reduce(torch.stack(parts).mean(), "mean").item())
                parts = []
        return losses

    half, losses = arguments.max_steps // 2, []
    if arguments.resume:
        accelerator.load_state(state)
    else:
        losses = train(0, half)
        accelerator.save_state(state)
    losses += train(half, arguments.max_steps)
    accelerator.save_model(model, arguments.output_dir)
    accelerator.print(f"train loss {losses[0]:.4f} -> {losses[-1]:.4f} in {arguments.max_steps} steps")
    if arguments.demo:
        accelerator.load_state(state)
        again = train(half, arguments.max_steps)
        worst = max(abs(one - other) for one, other in zip(again, losses[-len(again) :], strict=True))
        accelerator.print(f"{len(again)} steps again from {state}: losses differ by {worst:.1e} at most")
    accelerator.end_training()


if __name__ == "__main__":
    main()
