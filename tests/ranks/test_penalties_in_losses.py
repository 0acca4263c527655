"""A penalty over weights as one summand of the loss that is backpropagated, where ranks share out the weights (ZeRO 3): as in one process.

If a row fails, a loss with weight decay by hand, or with a distance to older weights, ends in an error of torch, or trains otherwise.
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
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long

ZERO3 = {"zero": {"stage": 3}}


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
    loop.accelerator.backward(loop.loss(step) + 0.1 * (gate * up(loop).square()).sum())
    with torch.no_grad():
        gate -= 0.1 * gate.grad
    loop.history.append(float(gate.sum()))
    gate.grad = None
    assert len(gate._backward_hooks or ()) == 0


def up(loop: Loop) -> Any:
    return next(p for name, p in loop.model.named_parameters() if name.endswith("layers.0.mlp.up_proj.weight"))


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


BODIES = {passes.__name__: looping(passes) for passes in (*RIGHT, *UNLIKE)}
CASES = [(passes.__name__, "zero3") for passes in (*RIGHT, *UNLIKE)]


def main(rank: int, world_size: int, cases: list[user_loops.Case]) -> dict[str, Any]:
    return user_loops.all_tried(BODIES, cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(main, BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_penalty_in_a_loss(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    refused = name in {passes.__name__ for passes in UNLIKE}
    user_loops.check(runs, name, layout, "with other numbers than the other replicas" if refused else "")


@pytest.mark.parametrize("kind", ["Penalty", "PenaltyOnLogits"])
def test_a_trainer_with_a_penalty_trains_as_replicas_with_whole_weights(kind: str, tmp_path: Path) -> None:
    jobs = [(kind, parallel, {"rows": 4, "model": "llama_tied"}) for parallel in (ZERO3, {})]
    mine, whole = user_steps.launch(jobs, 2, tmp_path)
    user_steps.same(mine[0], whole[0])
