"""Training on a stream whose end cuts an accumulation window short: stock takes no step then, and keeps the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.errors import UnsupportedError


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 2}
ASYNCHRONOUS = PP2 | {"pipeline": {"schedule": "pipedream_2bw"}}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """6 batches of two rows: with windows of 4, two are left at its end."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny.rows(12))


def main(rank: int, world_size: int, layout: dict[str, Any] | None, folder: str) -> tuple[list[float], dict[str, Any]]:
    trainer = Trainer(
        model=tiny.llama(layers=2),
        args=TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Stream(),
        data_collator=tiny.collate,
        callbacks=[] if layout is None else [HFParallelCallback({}, **layout)],
    )
    trainer.model_accepts_loss_kwargs = False  # each loss is divided by the number of batches in its window
    try:
        trainer.train()
    finally:
        if layout is not None:
            trainer.accelerator.hf_parallel.watchdog.stop()
    numbers = [entry[key] for entry in trainer.state.log_history if "loss" in entry for key in ("loss", "grad_norm")]
    state = trainer.accelerator.get_state_dict(trainer.model) if layout is not None else trainer.model.state_dict()
    return numbers, {name: tensor.tolist() for name, tensor in (state or {}).items()}


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param(PP2, 2, id="pp2"),
        pytest.param(PP2 | {"sp_size": 2}, 4, id="pp2xsp2", marks=pytest.mark.long),
        pytest.param({"tp_size": 2}, 2, id="tp2", marks=pytest.mark.long),
    ],
)
def test_what_a_short_window_leaves_is_in_the_next_step(layout: dict[str, Any], size: int, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    ((wanted, weights),) = run_ranks(main, 1, None, str(one), tmp_path=one, env=ENV, init_group=False)
    for numbers, state in run_ranks(main, size, layout, str(many), tmp_path=many, env=ENV):
        assert numbers == pytest.approx(wanted, rel=1e-5)
        for name, tensor in state.items():
            torch.testing.assert_close(torch.tensor(tensor), torch.tensor(weights[name]), rtol=1e-5, atol=1e-6)


def refused(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(UnsupportedError) as found:
        main(rank, world_size, ASYNCHRONOUS, folder)
    return str(found.value)


def test_updates_in_windows_of_another_size_are_refused_where_they_overlap(tmp_path: Path) -> None:
    for text in run_ranks(refused, 2, str(tmp_path), tmp_path=tmp_path, env=ENV):
        assert "ended after 2 of 4 batches" in text
        assert "schedule=pipedream_2bw" in text
