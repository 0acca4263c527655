"""A Trainer's method that saves the optimizer's state now and then only: the checkpoint without it is named, and none resumes from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
from rank_runner import run_ranks
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.errors import CheckpointError


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


class NowAndThen(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.state.global_step > 1:
            super()._save_optimizer_and_scheduler(output_dir)


class WeightsAlone(Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_model(str(Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")), True)


KINDS = {"now_and_then": NowAndThen, "weights_alone": WeightsAlone}


def trained(kind: str, folder: str, resumes: str | None = None, **more: Any) -> Trainer:
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1}
    trainer = KINDS[kind](
        model=tiny.llama(layers=2),
        args=TrainingArguments(folder, max_steps=2, **options, **more),
        train_dataset=tiny.rows(16),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({})],
    )
    try:
        trainer.train(resumes)
    finally:
        trainer.accelerator.hf_parallel.watchdog.stop()
    return trainer


def main(rank: int, world_size: int, kind: str, folder: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_parallel").addHandler(handler)
    trained(kind, folder)
    said.append("")
    try:
        trained(kind, folder, str(Path(folder, "checkpoint-1")))
    except CheckpointError as error:
        said.append(f"{error}")
    trained(kind, folder + "-model", save_only_model=True)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_the_state_of_the_optimizer_is_named(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(main, 2, kind, str(tmp_path / "run"), tmp_path=tmp_path, env=ENV)
    told = [text for text in first if "but no state of the optimizer" in text]
    assert ["checkpoint-1" in text for text in told] == [True, False][: len(told)]
    assert len(told) == (1 if kind == "now_and_then" else 2)
    assert all(KINDS[kind].__name__ in text for text in told)
    for found in (first, second):
        assert "checkpoint-1" in found[found.index("") + 1]
    assert not [text for text in second if "but no state" in text]
