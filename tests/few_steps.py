"""A stock Trainer of three steps, with or without hf_parallel, and what it logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import Trainer, TrainingArguments


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 2}
TP2 = {"tp_size": 2}
PP2_TP2 = {**PP2, **TP2}
ZERO1: dict[str, Any] = {"zero": {"stage": 1}}
ZERO3: dict[str, Any] = {"zero": {"stage": 3}}


def trainer_of(
    parallel: dict[str, Any] | None, folder: Path, kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    from hf_parallel import HFParallelCallback

    mp = (parallel or {}).get("pp_size", 1) * (parallel or {}).get("tp_size", 1)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8 // (world // mp),
        per_device_eval_batch_size=8 // (world // mp),
        max_steps=3,
        logging_steps=1,
        max_grad_norm=0.5,
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        remove_unused_columns=False,
    )
    return kind(
        args=arguments,
        train_dataset=tiny.rows(48, True),
        eval_dataset=tiny.rows(16, True),
        data_collator=tiny.collate,
        callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
        **options,
    )


def logged(trainer: Trainer) -> list[list[float]]:
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    return [[e[k] for k in ("loss", "grad_norm", "eval_loss") if k in e] for e in trainer.state.log_history[:-1]]
