"""Gradients between two batches of a step, where ranks have summands of them: changed as in one process, and never read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from thinning import chosen, thinned
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


def between(change: Callable[[Any], Any]) -> Callable[[Loop], None]:
    """Every parameter's gradient, or the parameter itself, is changed between the two batches of a step."""

    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.5))
        for step in range(STEPS):
            loop.accelerator.gradient_state._set_sync_gradients(False)  # as `accelerator.accumulate` does
            loop.backward(2 * step)
            for parameter in loop.named().values():
                change(parameter)
            loop.accelerator.gradient_state._set_sync_gradients(True)
            loop.backward(2 * step + 1)
            loop.step()

    return body


def halved(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def exchanged(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


def masked(parameter: Any) -> None:
    parameter.grad = parameter.grad.clone().mul(torch.arange(parameter.grad.shape[-1]) % 2 == 0)


def dropped(parameter: Any) -> None:
    parameter.grad = None


def limited(parameter: Any) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def signs(parameter: Any) -> None:
    parameter.grad = parameter.grad.sign() * 1e-3


def noted(parameter: Any) -> None:
    float(parameter.grad.abs().max())


def listed(parameter: Any) -> None:
    parameter.grad.tolist()


def decayed(parameter: Any) -> None:
    """Weight decay in the gradient: what is added is added on every rank."""
    parameter.grad = parameter.grad + 0.1 * parameter.detach()


def perturbed(parameter: Any) -> None:
    """Towards worse weights, as in sharpness-aware minimisation."""
    with torch.no_grad():
        parameter.add_(parameter.grad * 0.1)


RIGHT = {f.__name__: between(f) for f in (halved, exchanged, masked, dropped)}
READS = {f.__name__: between(f) for f in (limited, signs, noted, listed, decayed, perturbed)}
LAYOUTS = ("sp2", "sp2_zero1", "pp2")  # whose two stages share the embedding
CHANGES, REFUSED = ([(name, layout) for name in names for layout in LAYOUTS] for names in (RIGHT, READS))
CASES = CHANGES + REFUSED


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return user_loops.all_tried(RIGHT | READS, cases)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(main, RIGHT, chosen(request, CASES), tmp_path_factory.mktemp("loops"))


# What is refused is so on the layouts in turns.
@pytest.mark.parametrize(("name", "layout"), thinned(CHANGES, [("sp2", "sp2_zero1")]) + thinned(REFUSED, [LAYOUTS]))
def test_a_summand_is_changed_and_never_read(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    expected = "is read or limited between two batches of a step" if name in READS else ""
    user_loops.check(runs, name, layout, expected)
