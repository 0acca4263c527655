"""Methods of a Trainer's subclass that write or read training state: stock checkpoints call them, ours would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.trainer.callback import refuse_arguments
from hf_parallel.trainer.mixin import HFParallelTrainerMixin


class SavesSampler(Trainer):
    """Writes one more file beside the state."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        Path(output_dir, "sampler.txt").write_text("here")


def trainer(kind: type[Trainer], folder: Path, **options: Any) -> Trainer:
    more: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
    }
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **(more | options))
    callbacks = [HFParallelCallback()]
    return kind(tiny.llama(layers=2), arguments, tiny.collate, tiny.rows(4), callbacks=callbacks)


def test_they_are_refused_where_each_rank_saves_its_part(tmp_path: Path) -> None:
    refuse_arguments(trainer(Trainer, tmp_path), HFParallelConfig())
    refuse_arguments(trainer(SavesSampler, tmp_path, save_strategy="no"), HFParallelConfig())
    with pytest.raises(ConfigError, match=r"SavesSampler._save_optimizer_and_scheduler would not run: each rank"):
        refuse_arguments(trainer(SavesSampler, tmp_path), HFParallelConfig())


def test_stock_code_saves_for_them_in_one_process(tmp_path: Path) -> None:
    own = trainer(SavesSampler, tmp_path)
    assert not isinstance(own, HFParallelTrainerMixin)
    own.train()
    assert (tmp_path / "checkpoint-1" / "sampler.txt").is_file()
    assert isinstance(trainer(Trainer, tmp_path), HFParallelTrainerMixin)
