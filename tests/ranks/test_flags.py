"""A callback that stops, saves, evaluates or logs on one rank only is named, where ranks waited for each other or mixed their messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny
from rank_runner import run_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


class OnFirst(TrainerCallback):
    """Sets a flag after the second step, on the first rank alone."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            setattr(control, self.flag, True)


def main(rank: int, world_size: int, flag: str, parallel: dict[str, Any], folder: str) -> None:
    from hf_parallel import HFParallelCallback

    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        *(tiny.llama(layers=2), settings),
        train_dataset=tiny.rows(32),
        eval_dataset=tiny.rows(8),
        data_collator=tiny.collate,
        callbacks=[OnFirst(flag), HFParallelCallback({}, monitor={"hang_timeout_s": 5.0}, **parallel)],
    )
    try:
        trainer.train()
    finally:
        if rank == 0:  # the other one waits in its next step
            trainer.accelerator.hf_parallel.watchdog.stop()
    os._exit(1)


PP2, TP2, SP2 = {"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}, {"sp_size": 2}


@pytest.mark.parametrize(
    ("flag", "parallel"),
    [
        ("should_evaluate", {}),
        ("should_evaluate", TP2),
        ("should_evaluate", PP2),
        ("should_training_stop", PP2),
        ("should_training_stop", {}),
        ("should_save", SP2),
        ("should_epoch_stop", TP2),
        ("should_log", {}),
        ("should_log", PP2),
    ],
)
def test_a_flag_of_one_rank_is_named(flag: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"TrainerControl has {flag} after step 2 on rank 0"):
        run_ranks(main, 2, flag, parallel, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)
