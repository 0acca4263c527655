"""Loops of users that call `loss.backward()`, with losses that read parameters past the model: right, or refused.

If a row fails, replicas train a temperature, or a penalty, on what one of them has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_loops
from thinning import FAMILIES, chosen, covering, slow_if, thinned, unsaid
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


Clear = Callable[[Loop], None]


def by_optimizer(loop: Loop) -> None:
    loop.optimizers[0].zero_grad()


def by_model(loop: Loop) -> None:
    loop.model.zero_grad()


def by_hand(loop: Loop) -> None:
    for parameter in loop.named().values():
        parameter.grad = None


def to_zero(loop: Loop) -> None:
    loop.optimizers[0].zero_grad(set_to_none=False)


def never(loop: Loop) -> None:
    pass


def own(loop: Loop) -> Any:
    return loop.accelerator.unwrap_model(loop.model).temperature


def looping(step_of: Callable[[Loop, int], None], clear: Clear = by_optimizer) -> Callable[[Loop], None]:
    """A loop whose model has a temperature."""

    def body(loop: Loop) -> None:
        loop.model.temperature = torch.nn.Parameter(torch.ones(1))
        loop.prepare(
            torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.5)
        )  # whose steps are as long as gradients
        for step in range(STEPS):
            step_of(loop, step)
            loop.optimizers[0].step()
            clear(loop)

    return body


def product(loop: Loop, step: int) -> None:
    (loop.loss(step) * own(loop).sum()).backward()


def accumulated(loop: Loop, step: int) -> None:
    with loop.accelerator.no_sync(loop.model):
        (loop.loss(2 * step) * own(loop).sum() / 2).backward()
    (loop.loss(2 * step + 1) * own(loop).sum() / 2).backward()


def twice(loop: Loop, step: int) -> None:
    (loop.loss(2 * step) * own(loop).sum()).backward()
    (loop.loss(2 * step + 1) * own(loop).sum()).backward()


def after(loop: Loop, step: int) -> None:
    """A second loss, of what this replica has read, that the model is no part of."""
    loss = loop.loss(step)
    loss.backward()
    (own(loop).sum() * loss.detach()).backward()


def before(loop: Loop, step: int) -> None:
    loss = loop.loss(step)
    (own(loop).sum() * loss.detach()).backward()
    loss.backward()


def before_forward(loop: Loop, step: int) -> None:
    (own(loop).sum().square() * (loop.replica + 1) * 2 / (loop.replicas + 1)).backward()  # mean: that of one process
    loop.loss(step).backward()


def weights_after(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    (0.1 * loop.model.get_input_embeddings().weight.square().sum()).backward()


def weights_before(loop: Loop, step: int) -> None:
    loss = loop.loss(step)
    (0.1 * loop.model.get_input_embeddings().weight.square().sum()).backward()
    loss.backward()


def weights(loop: Loop, step: int) -> None:
    (loop.loss(step) + 0.1 * loop.model.get_input_embeddings().weight.square().sum()).backward()


def halved_between(loop: Loop, step: int) -> None:
    """Gradients that are reduced are exchanged for others before the next backward pass of the step."""
    (loop.loss(2 * step) * own(loop).sum()).backward()
    for parameter in loop.named().values():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
    (loop.loss(2 * step + 1) * own(loop).sum()).backward()


CLEARS: dict[str, Clear] = {f.__name__: f for f in (by_model, by_hand, to_zero, never)}
STEP = (
    product,
    accumulated,
    twice,
    after,
    before,
    before_forward,
    weights_after,
    weights_before,
    weights,
    halved_between,
)
BODIES = {f.__name__: looping(f) for f in STEP}
BODIES |= {f"product_{name}": looping(product, clear) for name, clear in CLEARS.items()}
BODIES |= {f"accumulated_{name}": looping(accumulated, clear) for name, clear in CLEARS.items()}
TWO = ("dp2", "zero1", "zero2", "zero3", "zero1_offload", "tp2", "pp2")
FOUR = ("tp2_zero1", "pp2_zero1", "pp2_dp2")
OF_FOUR = ("product", "accumulated", "after", "before", "before_forward", "halved_between")
LATE = "optimizer.step() was called on gradients that were never reduced"
OF_PARTS = "with other numbers than the other replicas"
IS_PART = "outside of the model's forward, where this rank has only its part of it"
# What is refused, and how; all else is right.
REFUSED: dict[str, dict[str, str]] = {
    "after": {"tp2": LATE, "zero3": OF_PARTS},
    "before_forward": {"zero3": OF_PARTS},
    **{name: {"tp2": IS_PART} for name in ("weights", "weights_before", "weights_after")},
}
CASES = [(name, layout) for name in BODIES for layout in TWO]
# Slow: layouts that are no parts of an optimizer's states take turns too; whatever a row is refused with is in a case of it.
KEPT = covering(CASES, (*FAMILIES, ("dp2", "pp2"), ("tp2", "zero3")))
KEPT += unsaid(CASES, KEPT, lambda name, layout: REFUSED.get(name, {}).get(layout, ""))
REST = set(CASES).difference(KEPT)
CASES_OF_FOUR = [(name, layout) for name in OF_FOUR for layout in FOUR]


def launched(cases: list[user_loops.Case], folder: Path, world_size: int) -> list[dict[str, Any]]:
    return user_loops.launched(
        user_loops.main_of(__name__), dict.fromkeys(name for name, _ in cases), cases, folder, world_size
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(chosen(request, CASES), tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def runs_of_four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(chosen(request, CASES_OF_FOUR), tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize(("name", "layout"), [pytest.param(*case, marks=slow_if(case, REST)) for case in CASES])
def test_a_loss_that_reads_parameters_past_the_model(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, REFUSED.get(name, {}).get(layout, ""))


@pytest.mark.parametrize(("name", "layout"), thinned(CASES_OF_FOUR))
def test_such_a_loss_on_two_axes(name: str, layout: str, runs_of_four: list[dict[str, Any]]) -> None:
    user_loops.check(runs_of_four, name, layout, REFUSED.get(name, {}).get(layout, ""))
