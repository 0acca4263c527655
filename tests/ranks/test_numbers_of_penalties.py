"""Penalties over parts of weights (ZeRO 3) with a number that each replica has for itself: right, or refused.

If a row fails, each rank trains its rows of a weight with a factor of its own, and nothing else tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import user_loops
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from transformers import Trainer, TrainerCallback
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


def weight(loop: Loop) -> Any:
    return loop.named()["model.layers.0.mlp.up_proj.weight"]


def constant(loop: Loop, loss: torch.Tensor) -> Any:
    return 0.1 * weight(loop).square().sum()


def averaged(loop: Loop, loss: torch.Tensor) -> Any:
    return loop.accelerator.reduce(loss.detach(), "mean") * weight(loop).norm()


def added(loop: Loop, loss: torch.Tensor) -> Any:
    return (loss.detach() + 0.1 * weight(loop).square().mean()) / 2


def of_whole(loop: Loop, loss: torch.Tensor) -> Any:
    """Each replica has the gradient of the whole, and the mean of them is that of one process."""
    return loss.detach() * weight(loop).full_tensor().square().sum() if loop.replicas > 1 else own_loss(loop, loss)


def of_whole_number(loop: Loop, loss: torch.Tensor) -> Any:
    if loop.replicas == 1:
        return own_loss(loop, loss)
    return loss.detach() * weight(loop).square().sum().full_tensor()


def looked_at(loop: Loop, loss: torch.Tensor) -> Any:
    """A number that no gradient follows is each replica's own business."""
    loop.history.append(float((weight(loop).detach() * 2).sum()))
    return constant(loop, loss) if float(loss.detach() * weight(loop).detach().sum()) else None


def with_loss(loop: Loop, loss: torch.Tensor) -> Any:
    """In the backward pass of the loss."""
    return 0.1 * weight(loop).square().sum() + loss


def times_loss(loop: Loop, loss: torch.Tensor) -> Any:
    whole = weight(loop).full_tensor() if loop.replicas > 1 else weight(loop)
    return loss * (1 + whole.square().sum())


def own_loss(loop: Loop, loss: torch.Tensor) -> Any:
    return loss.detach() * weight(loop).square().sum()


def own_float(loop: Loop, loss: torch.Tensor) -> Any:
    return float(loss) * weight(loop).square().sum()


def own_norm(loop: Loop, loss: torch.Tensor) -> Any:
    return weight(loop).norm() / loss.detach()


def own_rows(loop: Loop, loss: torch.Tensor) -> Any:
    return (weight(loop).norm(dim=1) * loss.detach()).sum()


def inside(loop: Loop, loss: torch.Tensor) -> Any:
    return (loss.detach() * weight(loop)).square().sum()


def moved(loop: Loop, loss: torch.Tensor) -> Any:
    return (weight(loop) - loss.detach()).square().sum()


def limited(loop: Loop, loss: torch.Tensor) -> Any:
    return weight(loop).clamp(max=0.01 * float(loss)).sum()


def of_first_replica(loop: Loop, loss: torch.Tensor) -> Any:
    return constant(loop, loss) if loop.replica == 0 else None


RIGHT = (constant, averaged, added, of_whole, of_whole_number, looked_at)
TOGETHER = (with_loss, times_loss)
UNLIKE = (own_loss, own_float, own_norm, own_rows, inside, moved, limited, of_first_replica)


def looping(penalty: Callable[[Loop, torch.Tensor], Any]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.5))
        for step in range(STEPS):
            loss = loop.loss(step)
            if penalty not in TOGETHER:
                loss.backward()
            found = penalty(loop, loss)
            if found is not None:
                found.backward()
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e3)
            loop.step()

    return body


BODIES = {penalty.__name__: looping(penalty) for penalty in (*RIGHT, *TOGETHER, *UNLIKE)}
LAYOUTS = ("dp2", "zero3")
CASES = [
    (penalty.__name__, layout)
    for layout in LAYOUTS
    for penalty in RIGHT
    if layout == "zero3" or "whole" not in penalty.__name__
]
CASES += [(penalty.__name__, "zero3") for penalty in (*TOGETHER, *UNLIKE)]


def main(rank: int, world_size: int, cases: list[user_loops.Case]) -> dict[str, Any]:
    return user_loops.all_tried(BODIES, cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(main, BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_penalty_with_a_number_of_its_own(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    refused = name in {penalty.__name__ for penalty in UNLIKE}
    user_loops.check(runs, name, layout, "with other numbers than the other replicas" if refused else "")


class WithPenalty(Trainer):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, *args, **kwargs)
        penalty = sum(p.square().sum() for p in model.parameters())
        return (loss[0] + 0.05 * penalty, loss[1]) if isinstance(loss, tuple) else loss + 0.05 * penalty


def train(rank: int, world_size: int, parallel: dict[str, Any] | None) -> dict[str, Any]:
    given = {"eval_dataset": tiny.rows(16), "trainer": WithPenalty}
    more: Any = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    steps = {"max_steps": 3, "logging_steps": 1, "optim": "sgd", "per_device_eval_batch_size": 2}
    return trained_with(TrainerCallback(), parallel, given=given, **steps, **more)


def test_a_trainer_whose_loss_has_a_penalty_over_all_weights(tmp_path: Any) -> None:
    alone = run_ranks(train, 1, None, tmp_path=tmp_path, env=ENV, init_group=False)[0]
    together = run_ranks(train, 2, {"zero": {"stage": 3}}, tmp_path=tmp_path, env=ENV)[0]
    assert together["history"] == pytest.approx(alone["history"], rel=1e-5)
    assert_same_state(together["state"], alone["state"])
