"""Gradients that a loop keeps, clears and puts back, as gradient surgery does: those of one process, or refused.

If a row fails, ZeRO steps without what the loop assigned after `zero_grad()`, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


Kept = dict[str, torch.Tensor]


def copies(loop: Loop) -> Kept:
    return {name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None}


def held(loop: Loop) -> Kept:
    return {name: p.grad for name, p in loop.model.named_parameters() if p.grad is not None}


def by_optimizer(loop: Loop) -> None:
    loop.optimizers[0].zero_grad()


def by_model(loop: Loop) -> None:
    loop.model.zero_grad()


def to_zeros(loop: Loop) -> None:
    loop.model.zero_grad(set_to_none=False)


def to_zeros_by_optimizer(loop: Loop) -> None:
    loop.optimizers[0].zero_grad(set_to_none=False)


def by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


def assigned(loop: Loop, *kept: Kept) -> None:
    for name, parameter in loop.model.named_parameters():
        if name in kept[0]:
            parameter.grad = kept[0][name] if len(kept) == 1 else kept[0][name] + kept[1][name]


def halved(loop: Loop, *kept: Kept) -> None:
    for name, parameter in loop.model.named_parameters():
        if name in kept[0]:
            parameter.grad = kept[0][name] * 0.5


def written(loop: Loop, *kept: Kept) -> None:
    for name, parameter in loop.model.named_parameters():
        if name in kept[0]:
            parameter.grad.copy_(sum(one[name] for one in kept))


def added(loop: Loop, *kept: Kept) -> None:
    for name, parameter in loop.model.named_parameters():
        if name in kept[0]:
            parameter.grad.add_(kept[0][name])


def surgery(loop: Loop, *kept: Kept) -> None:
    """PCGrad: each gradient without its part against the other's direction, parameter by parameter."""
    for name, parameter in loop.model.named_parameters():
        if name in kept[0]:
            one, other = kept[0][name], kept[1][name]
            along = (one * other).sum()
            parameter.grad = one + other - (along / (other * other).sum()).clamp(max=0.0) * other


def looping(
    keep: Callable[[Loop], Kept],
    clear: Callable[[Loop], None],
    put: Callable[..., None],
    *,
    losses: int = 1,
    passes: int = 0,
) -> Callable[[Loop], None]:
    """Gradients of some losses are kept and cleared, more passes follow, and what was kept is put there."""

    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.3, momentum=0.5))
        for step in range(STEPS):
            kept = []
            for index in range(losses):
                loop.backward(step + 3 * index)
                kept.append(keep(loop))
                clear(loop)
            for index in range(passes):
                loop.backward(step + 4 + index)
            put(loop, *kept)
            loop.step()

    return body


BODIES = {
    "assigned_after_optimizer": looping(copies, by_optimizer, assigned),
    "assigned_after_model": looping(copies, by_model, assigned),
    "assigned_after_hand": looping(copies, by_hand, assigned),
    "two_summed": looping(copies, by_optimizer, assigned, losses=2),
    "two_summed_by_model": looping(copies, by_model, assigned, losses=2),
    "surgery": looping(copies, by_optimizer, surgery, losses=2),
    "written_into_zeros": looping(copies, to_zeros, written),
    "two_written_into_zeros": looping(copies, to_zeros, written, losses=2),
    "written_into_zeros_of_optimizer": looping(copies, to_zeros_by_optimizer, written),
    "added_to_more": looping(copies, by_optimizer, added, passes=1),
    "assigned_over_more": looping(copies, by_optimizer, assigned, passes=1),
    "held": looping(held, by_optimizer, assigned),
    "held_halved": looping(held, by_optimizer, halved),
    "held_halved_by_model": looping(held, by_model, halved),
    "held_halved_by_hand": looping(held, by_hand, halved),
    "held_added": looping(held, by_optimizer, added, passes=1),
    "held_added_by_hand": looping(held, by_hand, added, passes=1),
}
GONE = "that code has kept from before (g = p.grad, or p.grad.detach() without a copy)"
REFUSED = {(name, layout): GONE for name in BODIES if name.startswith("held") for layout in ("zero1", "zero2")}
for layout in ("zero1", "zero2"):  # the optimizer's parts have the values until the next backward pass
    del REFUSED["held_halved_by_hand", layout]
LAYOUTS = ("dp2", "zero1", "zero2", "zero3", "tp2", "pp2")
CASES = [(name, layout) for name in BODIES for layout in LAYOUTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_are_put_back(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, REFUSED.get((name, layout), ""))
