"""An evaluation of a stream, whose length nobody knows, is that of the same rows in a list.

If this fails, rows of a last batch that is not full count twice in a loss, or predictions have more rows than the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from rank_runner import run_ranks
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback


ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pp_size": 2}, "dp2": {}}
LENGTHS = (5, 6, 8)  # of batches of two rows, or of four over two replicas


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny.rows(self.length))


def main(rank: int, world_size: int, layout: str, folder: str) -> dict[int, tuple[float, float, int]]:
    found = {}
    for length in LENGTHS:
        arguments = TrainingArguments(
            folder,
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=tiny.llama(layers=2),
            args=arguments,
            train_dataset=tiny.rows(8),
            data_collator=tiny.collate,
            callbacks=[HFParallelCallback({}, **LAYOUTS[layout])],
        )
        losses = [trainer.evaluate(data)["eval_loss"] for data in (tiny.rows(length), Stream(length))]
        found[length] = (*losses, len(trainer.predict(Stream(length)).predictions))
        trainer.accelerator.hf_parallel.watchdog.stop()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_of_a_stream_is_that_of_its_rows(layout: str, tmp_path: Path) -> None:
    for found in run_ranks(main, 2, layout, str(tmp_path), tmp_path=tmp_path, env=ENV):
        for length, (of_rows, of_stream, predicted) in found.items():
            assert of_stream == pytest.approx(of_rows, rel=1e-6), length
            assert predicted == length
