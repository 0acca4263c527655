"""Trackers that save the model on the main process alone: refused before training where that has a part of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from transformers import Trainer, TrainingArguments
from transformers.integrations import WandbCallback, integration_utils

from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.trainer.arguments import refuse_arguments


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a Trainer that logs to wandb, which need not be installed."""
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())

    def make(saves: str) -> Trainer:
        monkeypatch.setenv("WANDB_LOG_MODEL", saves)
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=2)
        return Trainer(tiny.llama(layers=2), arguments, tiny.collate, tiny.rows(4), callbacks=[WandbCallback()])

    return make


@pytest.mark.parametrize("saves", ["end", "checkpoint"])
@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"tp_size": 2}, r"tp_size \* pp_size = 2 \* 1, zero.stage=0"),
        ({"pp_size": 2}, r"tp_size \* pp_size = 1 \* 2, zero.stage=0"),
        ({"zero": {"stage": 3}}, r"tp_size \* pp_size = 1 \* 1, zero.stage=3"),
    ],
)
def test_a_tracker_that_would_save_a_part_of_the_model_is_refused(
    tracked: Any, saves: str, parts: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"WANDB_LOG_MODEL={saves} with {named}: .* trainer.save_model\(folder\)"):
        refuse_arguments(tracked(saves), HFParallelConfig.model_validate(parts))


def test_one_that_saves_nothing_is_not(tracked: Any) -> None:
    refuse_arguments(tracked("false"), HFParallelConfig(tp_size=2))


@pytest.mark.parametrize("parts", [{}, {"zero": {"stage": 1}}, {"sp_size": 2}])
def test_one_that_has_the_whole_model_is_not(tracked: Any, parts: dict[str, Any]) -> None:
    refuse_arguments(tracked("end"), HFParallelConfig.model_validate(parts))
