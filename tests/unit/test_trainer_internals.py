"""What hf_parallel takes for granted of the stock Trainer is checked before a run, method by method."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Trainer

from hf_parallel import UnsupportedError
from hf_parallel.compat.private_transformers import OVERRIDDEN, trainer_internals
from hf_parallel.trainer.mixin import HFParallelTrainerMixin


def overridden() -> set[str]:
    ours = [cls for cls in HFParallelTrainerMixin.__mro__ if cls.__module__.startswith("hf_parallel")]
    names = {name for cls in ours for name, value in vars(cls).items() if callable(value)}
    return {name for name in names if not name.startswith("__") and hasattr(Trainer, name)}


def test_every_overridden_method_is_checked() -> None:
    assert overridden() == set(OVERRIDDEN)


def test_the_stock_trainer_passes() -> None:
    trainer_internals()


class Renamed(Trainer):
    _save_checkpoint = None


class Extended(Trainer):
    def training_step(self, model: Any, inputs: Any, scale: float, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("stock", "text"),
    [
        (Renamed, r"Trainer has no _save_checkpoint\. Install transformers>="),
        (
            Extended,
            r"training_step\(model, inputs, scale, num_items_in_batch\) in place of training_step\(model, inputs, num",
        ),
    ],
)
def test_a_method_that_changed_is_named(stock: type[Trainer], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        trainer_internals(stock)
