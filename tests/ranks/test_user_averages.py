"""Averages of weights (EMA) of a model whose embedding is its head, taken in and out during training: as in one process.

A state dict names the tied matrix twice, and its deep copy is one matrix with two names: an average that goes through the names
moves that matrix twice a step, in one process. A rank that named it once would end with other averages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import user_loops
import user_steps
from rank_runner import run_ranks
from thinning import chosen, rest_runs, slow_if, thinned
from transformers import Trainer, TrainerCallback
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS = ("dp2", "zero1", "zero3", "pp2", "pp2_zbv", "tp2")


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def follow(shadow: dict[str, Any], state: dict[str, Any]) -> None:
    for name, tensor in state.items():
        shadow[name].mul_(0.6).add_(tensor.detach(), alpha=0.4)


def averaged(start: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Loop], None]:
    """The average is evaluated after the second step, and is what is left after the last."""

    def body(loop: Loop) -> None:
        loop.prepare()
        model = loop.model
        shadow = start(model.state_dict())
        for step in range(STEPS):
            loop.backward(step)
            loop.step()
            follow(shadow, model.state_dict())
            if step == 1:
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict(shadow)
                with torch.no_grad():
                    loop.loss(9)
                model.load_state_dict(kept)
        model.load_state_dict(shadow)

    return body


def by_parameter(loop: Loop) -> None:
    """Through `named_parameters`, which has each matrix once, on any rank."""
    loop.prepare()
    shadow = plain(dict(loop.model.named_parameters()))
    for step in range(STEPS):
        loop.backward(step)
        loop.step()
        follow(shadow, dict(loop.model.named_parameters()))
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            parameter.copy_(shadow[name])


def unlike_names(loop: Loop) -> None:
    """Two names with two values: torch copies both, and the last one stays."""
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        loop.step()
        state = plain(loop.model.state_dict())
        if "lm_head.weight" in state:  # on every rank that has the matrix
            state["lm_head.weight"] = state["lm_head.weight"] * 0.5
        loop.model.load_state_dict(state)


BODIES: dict[str, Callable[[Loop], None]] = {
    "by_deepcopy": averaged(copy.deepcopy),
    "by_name": averaged(plain),
    "by_parameter": by_parameter,
    "unlike_names": unlike_names,
}


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    def build() -> Any:
        return tiny.llama(tied=True)

    return {f"{layout}-{name}": user_loops.tried(layout, BODIES[name], build=build) for name, layout in cases}


CASES = [(name, layout) for name in BODIES for layout in LAYOUTS]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("averages")
    alone = run_ranks(main, 1, [(name, "one") for name in BODIES], tmp_path=folder, env=ENV, init_group=False)[0]
    return alone | run_ranks(main, 2, chosen(request, CASES), tmp_path=folder, env=ENV, timeout=200.0)[0]


@pytest.mark.parametrize(("name", "layout"), thinned(CASES, [("pp2", "pp2_zbv"), ("dp2", "zero1")]))
def test_an_average_of_a_tied_model_is_that_of_one_process(name: str, layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{layout}-{name}"], runs[f"one-{name}"]) < 1e-5


class Average(TrainerCallback):
    """Follows the weights, takes their place once for a moment, and is what is saved."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.shadow = copy.deepcopy(model.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        follow(self.shadow, model.state_dict())
        if state.global_step == 2:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(self.shadow)
            model.load_state_dict(kept)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.load_state_dict(self.shadow)


REST = ("dp2", "pp2")  # slow: parts of replicas, and another schedule, are in other rows
user_steps.KINDS["Average"] = (Trainer, {"change": lambda trainer: trainer.add_callback(Average())})


def trainers(rank: int, world_size: int, layouts: tuple[str, ...], folder: str) -> Any:
    rows = {layout: 4 if layout in ("dp2", "zero1", "zero3") else 8 for layout in layouts}
    jobs = [("Average", user_loops.LAYOUTS[each], {"model": "llama_tied", "rows": rows[each]}) for each in layouts]
    return dict(zip(layouts, user_steps.many(rank, world_size, jobs, folder), strict=True))


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mine = tuple(layout for layout in LAYOUTS if layout not in REST or rest_runs(request))
    for world_size, layouts in ((1, ("one",)), (2, mine)):
        folder = tmp_path_factory.mktemp("trainers")
        options = {"init_group": world_size > 1, "env": ENV, "timeout": 200.0}
        found |= run_ranks(trainers, world_size, layouts, str(folder), tmp_path=folder, **options)[0]
    return found


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=slow_if(layout, REST)) for layout in LAYOUTS])
def test_an_average_that_a_callback_leaves_is_what_is_saved(layout: str, trained: dict[str, Any]) -> None:
    user_steps.same(trained[layout], trained["one"])
