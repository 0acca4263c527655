"""What hf_parallel takes for granted of the stock Trainer and Accelerator is checked before a run, method by method."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from accelerate import Accelerator, ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from transformers import LlamaForCausalLM, Trainer

from hf_parallel import UnsupportedError
from hf_parallel.compat.private_accelerate import (
    OF_ACCELERATOR,
    OF_OPTIMIZER,
    OF_PARALLELISM_CONFIG,
    OF_SCHEDULER,
    accelerator_internals,
    prepared_by,
)
from hf_parallel.compat.private_transformers import CACHES, OVERRIDDEN, cache_output, trainer_internals
from hf_parallel.trainer.plugin import HFParallelPlugin, RawLoopAccelerator
from hf_parallel.trainer.prepared import HFParallelOptimizer, HFParallelScheduler
from hf_parallel.trainer.trainer import HFParallelTrainer


def overridden(made: type, stock: type) -> set[str]:
    ours = [cls for cls in made.__mro__ if cls.__module__.startswith("hf_parallel")]
    names = {name for cls in ours for name, value in vars(cls).items() if callable(value)}
    return {name for name in names if not name.startswith("__") and hasattr(stock, name)}


def test_every_overridden_method_is_checked() -> None:
    assert overridden(HFParallelTrainer, Trainer) == set(OVERRIDDEN)
    assert overridden(RawLoopAccelerator, Accelerator) == set(OF_ACCELERATOR)
    assert overridden(HFParallelPlugin, ParallelismConfig) == set(OF_PARALLELISM_CONFIG)
    assert overridden(HFParallelOptimizer, AcceleratedOptimizer) == set(OF_OPTIMIZER)
    assert overridden(HFParallelScheduler, AcceleratedScheduler) == set(OF_SCHEDULER)


def test_the_stock_classes_pass() -> None:
    trainer_internals()
    accelerator_internals()


def test_what_another_package_puts_on_the_trainer_may_take_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Trainer.training_step
    monkeypatch.setattr(Trainer, "training_step", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    trainer_internals()


class Scaled(Accelerator):
    def backward(self, loss: Any, scale: float, **kwargs: Any) -> None:
        super().backward(loss * scale, **kwargs)


def test_a_method_of_the_accelerator_that_changed_is_named() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Scaled has backward\(loss, scale, kwargs\) in place of backward\(loss, kwargs\)"
    ):
        accelerator_internals(Scaled)


def test_a_method_of_the_scheduler_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AcceleratedScheduler, "step")
    with pytest.raises(UnsupportedError, match=r"AcceleratedScheduler has no step\. Install accelerate>="):
        accelerator_internals()


def test_lists_of_prepared_objects_that_are_not_there_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"has no Accelerator\._models.* Install accelerate>="):
        prepared_by(object.__new__(Accelerator))


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


def test_a_cache_is_left_out_of_predictions_by_the_name_that_stock_leaves_out() -> None:
    assert f'"keys_to_ignore_at_inference", ["{cache_output()}"])' in inspect.getsource(Trainer.prediction_step)
    assert cache_output() in inspect.signature(LlamaForCausalLM.forward).parameters
    assert cache_output() in CACHES
