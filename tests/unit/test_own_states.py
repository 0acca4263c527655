"""Methods of a Trainer's subclass that write or read training state: they run if ours is what they call in the place of stock."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback, HFParallelTrainer
from hf_parallel.checkpoints.state.description import DESCRIPTION
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.trainer.arguments import refuse_arguments
from hf_parallel.trainer.mixin import HFParallelTrainerMixin


class SavesSampler(Trainer):
    """Writes one more file beside the state."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        Path(output_dir, "sampler.txt").write_text("here")


class SavesAlone(Trainer):
    """Writes the state by itself."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        Path(output_dir, "sampler.txt").write_text("here")


def decorated(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


class SavesInside(Trainer):
    """Calls that of Trainer from a function of its own, and is decorated."""

    @decorated
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        def save() -> None:
            super(SavesInside, self)._save_optimizer_and_scheduler(output_dir)

        save()


class SavesByName(SavesSampler):
    """Goes round what stands between."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        Trainer._save_optimizer_and_scheduler(self, output_dir)


def trainer(kind: type[Trainer], folder: Path, **options: Any) -> Trainer:
    more: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
    }
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **(more | options))
    callbacks = [] if issubclass(kind, HFParallelTrainer) else [HFParallelCallback()]
    return kind(tiny.llama(layers=2), arguments, tiny.collate, tiny.rows(4), callbacks=callbacks)


def test_they_are_refused_where_each_rank_saves_its_part(tmp_path: Path) -> None:
    for kind in (Trainer, SavesSampler, SavesInside):
        refuse_arguments(trainer(kind, tmp_path), HFParallelConfig())
    refuse_arguments(trainer(SavesAlone, tmp_path, save_strategy="no"), HFParallelConfig())
    for kind in (SavesAlone, SavesByName):
        refused = rf"{kind.__name__}._save_optimizer_and_scheduler does not call super\(\)._save_optimizer_and_scheduler: each"
        with pytest.raises(ConfigError, match=refused):
            refuse_arguments(trainer(kind, tmp_path), HFParallelConfig())


def test_a_method_that_a_library_puts_on_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", SavesAlone._save_optimizer_and_scheduler)
    with pytest.raises(ConfigError, match=r"Trainer._save_optimizer_and_scheduler does not call super"):
        refuse_arguments(trainer(Trainer, tmp_path), HFParallelConfig())


@pytest.mark.parametrize("kind", [SavesAlone, SavesSampler])
def test_in_one_process_they_run(kind: type[Trainer], tmp_path: Path) -> None:
    own = trainer(kind, tmp_path)
    assert isinstance(own, HFParallelTrainerMixin) == (kind is SavesSampler)
    own.train()
    folder = tmp_path / "checkpoint-1"
    assert (folder / "sampler.txt").is_file()
    assert (folder / DESCRIPTION).is_file() == (kind is SavesSampler)
    assert isinstance(trainer(Trainer, tmp_path), HFParallelTrainerMixin)


def test_a_class_with_ours_built_in_may_call_it(tmp_path: Path) -> None:
    class Mine(HFParallelTrainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            Path(output_dir, "sampler.txt").write_text("here")

    own = trainer(Mine, tmp_path)
    own.train()
    assert {"sampler.txt", DESCRIPTION} <= {each.name for each in (tmp_path / "checkpoint-1").iterdir()}
