"""Penalties over parts of weights (ZeRO 3) with a number that each replica has for itself: right, or refused.

If a row fails, each rank trains its rows of a weight with a factor of its own, and nothing else tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
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
UNLIKE = (own_loss, own_float, own_norm, own_rows, inside, moved, limited, of_first_replica)


def looping(penalty: Callable[[Loop, torch.Tensor], Any]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.5))
        for step in range(STEPS):
            loss = loop.loss(step)
            loss.backward()
            found = penalty(loop, loss)
            if found is not None:
                found.backward()
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e3)
            loop.step()

    return body


BODIES = {penalty.__name__: looping(penalty) for penalty in (*RIGHT, *UNLIKE)}
LAYOUTS = ("dp2", "zero3")
CASES = [
    (penalty.__name__, layout)
    for layout in LAYOUTS
    for penalty in RIGHT
    if layout == "zero3" or "whole" not in penalty.__name__
]
CASES += [(penalty.__name__, "zero3") for penalty in UNLIKE]


def main(rank: int, world_size: int, cases: list[user_loops.Case]) -> dict[str, Any]:
    return user_loops.all_tried(BODIES, cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(main, BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_penalty_with_a_number_of_its_own(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    refused = name in {penalty.__name__ for penalty in UNLIKE}
    user_loops.check(runs, name, layout, "with other numbers than the other replicas" if refused else "")
