"""What users do to a whole model around training, where ranks have shards of it: as in one process, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from torch import nn
from torch.nn.utils import prune
from transformers import TrainerCallback

from hf_parallel.errors import UnsupportedError


pytestmark = pytest.mark.timeout(120)


def pruned() -> Any:
    model = tiny.llama(layers=2)
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.3)
    return model


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny.llama(layers=2), LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))


class DrawsAgain(TrainerCallback):
    """Draws the head anew, as torch does with new layers."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            torch.manual_seed(5)
            nn.init.normal_(model.lm_head.weight, std=0.02)


class Unloads(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.merge_and_unload()


class Replaces(TrainerCallback):
    """Puts a new head on, and saves."""

    trainer: Any

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
        self.trainer.save_model("saved")


CASES: dict[str, tuple[Callable[[], Any], type[TrainerCallback]]] = {
    "pruned": (pruned, TrainerCallback),
    "drawn": (lambda: tiny.llama(layers=2), DrawsAgain),
    "unloaded": (adapted, Unloads),
    "replaced": (lambda: tiny.llama(layers=2), Replaces),
}


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Losses and weights at the end of each case; or the error."""
    parallel = {"tp_size": 2} if world_size > 1 else None
    found: dict[str, Any] = {}
    for name, (model, callback) in CASES.items():
        try:
            found[name] = trained_with(
                callback(), parallel, model=model, rows=32, max_steps=3, adam_epsilon=1e-4, logging_steps=1
            )
        except UnsupportedError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    options: dict[str, Any] = {"tmp_path": tmp_path_factory.mktemp("changed"), "env": ENV}
    return run_ranks(trained, 1, init_group=False, **options)[0], run_ranks(trained, 2, **options)


@pytest.mark.parametrize("name", ["pruned", "drawn"])
def test_it_trains_as_in_one_process(name: str, runs: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, ranks = runs[0][name], runs[1][0][name]
    assert not isinstance(ranks, str), ranks
    assert ranks["history"] == pytest.approx(alone["history"], rel=1e-5)
    assert ranks["state"].keys() == alone["state"].keys()
    assert_same_state(ranks["state"], alone["state"])


REFUSED = {
    "unloaded": r"merge_and_unload\(\) of a model of which this rank has a part .*Save the adapters on every rank",
    "replaced": r"lm_head was replaced or taken out after the model was prepared.*merge adapters in what was saved",
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_were_taken_out_are_not_saved_in_place_of_what_took_theirs(
    name: str, runs: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    assert not isinstance(runs[0][name], str)
    said = [found[name] for found in runs[1]]
    assert len(set(said)) == 1, said
    assert re.search(REFUSED[name], said[0]), said
