"""Penalties over weights that ranks share out (ZeRO 3), in a loss or beside it: as in one process, or refused.

If a row fails, a loss with weight decay by hand, or with a distance to older weights, ends in an error of torch, or each rank
trains its rows of a weight with a number of its own, and nothing else tells.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
import user_steps
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from transformers import Trainer, TrainerCallback
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long

ZERO3 = {"zero": {"stage": 3}}


def weight(loop: Loop) -> Any:
    return loop.named()["model.layers.0.mlp.up_proj.weight"]


def squares(loop: Loop, kept: Callable[[str], bool] = lambda name: True) -> Any:
    return 0.01 * sum(p.square().sum() for name, p in loop.model.named_parameters() if kept(name))


def together(loop: Loop, step: int) -> None:
    loop.accelerator.backward(loop.loss(step) + squares(loop))


def plain_backward(loop: Loop, step: int) -> None:
    (squares(loop) + loop.loss(step)).backward()


def of_blocks(loop: Loop, step: int) -> None:
    loop.accelerator.backward(loop.loss(step) + squares(loop, lambda name: ".layers." in name))


def of_embedding(loop: Loop, step: int) -> None:
    loop.accelerator.backward(loop.loss(step) + squares(loop, lambda name: ".layers." not in name))


def made_before(loop: Loop, step: int) -> None:
    penalty = squares(loop)
    loop.accelerator.backward((loop.loss(step) + penalty) / 2)


def in_place(loop: Loop, step: int) -> None:
    loss = squares(loop)
    loss += 2 * loop.loss(step)
    loop.accelerator.backward(loss)


def of_norms(loop: Loop, step: int) -> None:
    penalty: Any = 0.0
    for parameter in loop.model.parameters():
        penalty = penalty + 0.05 * parameter.norm() + 0.001 * parameter.abs().sum()
    loop.accelerator.backward(loop.loss(step) - penalty)


def to_older(loop: Loop, step: int) -> None:
    """The distance from the weights of the step before."""
    older = vars(loop).get("older") or {name: p.detach() * 0.9 for name, p in loop.model.named_parameters()}
    distance = sum((p - older[name]).square().sum() for name, p in loop.model.named_parameters())
    vars(loop)["older"] = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    loop.accelerator.backward(loop.loss(step) + 0.1 * distance)


def plain_older(loop: Loop) -> dict[str, torch.Tensor]:
    """Whole weights as they were loaded, which are no parts."""
    older: dict[str, torch.Tensor] = vars(loop)["loaded"]
    return older


def to_loaded(loop: Loop, step: int) -> None:
    """A distance from the weights as they were loaded, while embedding and head are gathered."""
    loss = loop.loss(step)
    distance = sum((p - plain_older(loop)[name]).square().sum() for name, p in loop.model.named_parameters())
    loop.accelerator.backward(loss + 0.1 * distance)


def weighed(loop: Loop, step: int) -> None:
    """As `to_loaded`, each element with a weight of its own, rows with another."""
    loss: Any = loop.loss(step)
    for name, p in loop.model.named_parameters():
        older = plain_older(loop)[name]
        important = older.abs() / older.abs().mean()
        loss = loss + 0.05 * (important * (older * 0.9 - p) ** 2 / (1 + older.square())).sum()
        loss = loss + 0.01 * ((p * older).sum() * older.mean())
    loop.accelerator.backward(loss)


def of_a_gate(loop: Loop, step: int) -> None:
    """With a factor for each element that is trained beside the model, by hand."""
    gate = vars(loop).setdefault("gate", torch.ones(64, 32, requires_grad=True))
    loop.accelerator.backward(loop.loss(step) + 0.1 * (gate * weight(loop).square()).sum())
    with torch.no_grad():
        gate -= 0.1 * gate.grad
    loop.history.append(float(gate.sum()))
    gate.grad = None
    assert len(gate._backward_hooks or ()) == 0


def to_kept(loop: Loop, step: int) -> None:
    """The distance from copies that were made between steps, in parts, while embedding and head are gathered."""
    kept = vars(loop).setdefault("kept", {n: p.detach().clone() * 0.9 for n, p in loop.model.named_parameters()})
    loss = loop.loss(step)
    distance = sum(((p - kept[n]) * kept[n]).sum() for n, p in loop.model.named_parameters())
    loop.accelerator.backward(loss + 0.1 * distance)


def of_sums(loop: Loop, step: int) -> None:
    loop.accelerator.backward(loop.loss(step) + 0.01 * sum(p.sum() for p in loop.model.parameters()))


def own_weights(loop: Loop, step: int) -> None:
    """Weights of elements that each replica has for itself: as many ones on both."""
    loss: Any = loop.loss(step)
    for name, p in loop.model.named_parameters():
        mask = torch.zeros_like(plain_older(loop)[name]).flatten()
        mask[loop.replica :: 2] = 1
        loss = loss + (mask.view(p.shape) * p.square()).sum()
    loop.accelerator.backward(loss)


def on_logits(loop: Loop, step: int) -> None:
    rows = tiny.collate(tiny.rows(64))
    mine = user_loops.ROWS // loop.replicas
    first = step * user_loops.ROWS + loop.replica * mine
    part = {name: value[first : first + mine] for name, value in rows.items()}
    loss = user_steps.on_logits(loop.model(input_ids=part["input_ids"]).logits, part["labels"])
    loop.history.append(float(loop.accelerator.reduce(loss.detach(), "mean")))
    loop.accelerator.backward(loss + squares(loop))


def accumulated(loop: Loop, step: int) -> None:
    with loop.accelerator.no_sync(loop.model):
        loop.accelerator.backward((loop.loss(2 * step) + squares(loop)) / 2)
    loop.accelerator.backward((loop.loss(2 * step + 1) + squares(loop)) / 2)


def own_factor(loop: Loop, step: int) -> None:
    loss = loop.loss(step)
    loop.accelerator.backward(loss + loss.detach() * squares(loop))


def own_product(loop: Loop, step: int) -> None:
    loop.accelerator.backward(loop.loss(step) * squares(loop))


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


RIGHT = (
    *(together, plain_backward, of_blocks, of_embedding, made_before, in_place, of_norms, to_older, on_logits),
    *(accumulated, to_loaded, weighed, of_a_gate, to_kept, of_sums),
)
UNLIKE = (own_factor, own_product, own_weights)


def looping(passes: Callable[[Loop, int], None]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        vars(loop)["loaded"] = {name: p.detach().clone() * 0.95 for name, p in loop.model.named_parameters()}
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5))
        for step in range(STEPS):
            passes(loop, step)
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)
            loop.step()

    return body


RIGHT_NUMBERS = (constant, averaged, added, of_whole, of_whole_number, looked_at)
TOGETHER = (with_loss, times_loss)
UNLIKE_NUMBERS = (own_loss, own_float, own_norm, own_rows, inside, moved, limited, of_first_replica)


def looping_with(penalty: Callable[[Loop, torch.Tensor], Any]) -> Callable[[Loop], None]:
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


BODIES = {passes.__name__: looping(passes) for passes in (*RIGHT, *UNLIKE)}
BODIES |= {penalty.__name__: looping_with(penalty) for penalty in (*RIGHT_NUMBERS, *TOGETHER, *UNLIKE_NUMBERS)}
CASES = [(name, "zero3") for name in BODIES]
CASES += [(penalty.__name__, "dp2") for penalty in RIGHT_NUMBERS if "whole" not in penalty.__name__]
REFUSED = {unlike.__name__ for unlike in (*UNLIKE, *UNLIKE_NUMBERS)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_penalty_in_a_loss(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, "with other numbers than the other replicas" if name in REFUSED else "")


@pytest.mark.parametrize("kind", ["Penalty", "PenaltyOnLogits"])
def test_a_trainer_with_a_penalty_trains_as_replicas_with_whole_weights(kind: str, tmp_path: Path) -> None:
    jobs = [(kind, parallel, {"rows": 4, "model": "llama_tied"}) for parallel in (ZERO3, {})]
    mine, whole = user_steps.launch(jobs, 2, tmp_path)
    user_steps.same(mine[0], whole[0])


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
