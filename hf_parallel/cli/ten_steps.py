"""The script of `hf-parallel test`: ten steps of a tiny model in a stock Trainer, and what every process saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_parallel  # prepares a launched process, before TrainingArguments are made


STEPS = 10
LENGTH = 16


def run(settings: dict[str, Any], folder: Path) -> None:
    """Train, and let rank 0 write losses and processes to `result.json`.

    Args:
        settings: blocks, heads, rows (of a batch of one replica), accumulation, precision, on_cpu, clip (largest gradient
            norm), alone (without hf_parallel).
        folder: Folder of the run.
    """
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=settings["rows"],
        gradient_accumulation_steps=settings["accumulation"],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=settings["clip"],
        optim="adamw_torch",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=settings["on_cpu"],
        bf16=settings["precision"] == "bf16",
        fp16=settings["precision"] == "fp16",
    )
    torch.manual_seed(0)
    heads = settings["heads"]
    sizes = {"vocab_size": 32 * heads, "hidden_size": 8 * heads, "intermediate_size": 16 * heads}
    config = LlamaConfig(
        **sizes, num_hidden_layers=settings["blocks"], num_attention_heads=heads, num_key_value_heads=heads
    )
    model = LlamaForCausalLM(config)
    total = STEPS * settings["accumulation"] * settings["rows"] * settings["replicas"]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(
        0, sizes["vocab_size"] // 4, (total, LENGTH), generator=generator
    )  # a quarter: there is something to learn
    data = [{"input_ids": row, "labels": row} for row in rows]
    callbacks: list[TrainerCallback] = [] if settings["alone"] else [hf_parallel.HFParallelCallback()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    ranks: list[Any] = [(0, os.getpid())]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (dist.get_rank(), os.getpid()))
    if trainer.args.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (folder / "result.json").write_text(json.dumps({"losses": losses, "ranks": ranks}), encoding="utf-8")


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), Path(sys.argv[2]))
