"""Loops that run several backward passes a step, or several optimizers: each gradient is reduced once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_loops
from rank_runner import RankError, run_ranks
from thinning import chosen, thinned
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


def twice(loop: Loop) -> None:
    loop.prepare()
    for step in range(STEPS):
        loop.backward(2 * step)
        loop.backward(2 * step + 1)
        loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)))
        loop.step()


def both_forwards_first(loop: Loop) -> None:
    loop.prepare()
    for step in range(STEPS):
        first, second = loop.loss(2 * step), loop.loss(2 * step + 1)
        loop.accelerator.backward(first)
        loop.accelerator.backward(second)
        loop.step()


def cleared_late(loop: Loop) -> None:
    """The order of torch's tutorials: forward, zero_grad, backward, step."""
    loop.prepare()
    for step in range(STEPS):
        loss = loop.loss(step)
        loop.optimizers[0].zero_grad()
        loop.accelerator.backward(loss)
        loop.optimizers[0].step()


def never_cleared(loop: Loop) -> None:
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        loop.optimizers[0].step()


def thrice_scaled(loop: Loop) -> None:
    loop.prepare()
    for step in range(STEPS):
        for part in range(3):
            loop.accelerator.backward(loop.loss(3 * step + part) / (part + 2))
        loop.step()


def muon_and_adamw(loop: Loop) -> None:
    def is_matrix(name: str, parameter: Any) -> bool:
        return parameter.ndim == 2 and "embed" not in name

    named = list(loop.model.named_parameters())
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    loop.prepare(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, eps=1e-4))
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


def sgd_and_adamw(loop: Loop) -> None:
    named = list(loop.model.named_parameters())
    halves = [[p for name, p in named if ("mlp" in name) == wanted] for wanted in (True, False)]
    loop.prepare(torch.optim.SGD(halves[0], lr=0.1, momentum=0.9), torch.optim.AdamW(halves[1], lr=1e-2, eps=1e-4))
    for step in range(STEPS):
        loop.backward(2 * step)
        loop.backward(2 * step + 1)
        loop.step()


def taking_turns(loop: Loop) -> None:
    """Two optimizers, each of which steps on a loss of its own; the other's gradients stay for its turn."""
    named = list(loop.model.named_parameters())
    halves = [[p for name, p in named if ("mlp" in name) == wanted] for wanted in (True, False)]
    loop.prepare(*(torch.optim.SGD(half, lr=0.1) for half in halves))
    for step in range(STEPS):
        loop.backward(2 * step)
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad()
        loop.backward(2 * step + 1)
        loop.optimizers[1].step()
        loop.optimizers[1].zero_grad()


def half_twice(loop: Loop) -> None:
    loop.prepare()
    for step in range(STEPS):
        loss = loop.loss(step)
        loop.accelerator.backward(loss / 2, retain_graph=True)
        loop.accelerator.backward(loss / 4)
        loop.step()


def forward_for_nothing(loop: Loop) -> None:
    """A training forward whose loss is looked at only."""
    loop.prepare()
    for step in range(STEPS):
        loop.loss(2 * step)
        loop.backward(2 * step + 1)
        loop.step()


BODIES: dict[str, Callable[[Loop], None]] = {
    body.__name__: body
    for body in (
        twice,
        both_forwards_first,
        cleared_late,
        never_cleared,
        thrice_scaled,
        muon_and_adamw,
        sgd_and_adamw,
        taking_turns,
        half_twice,
        forward_for_nothing,
    )
}
ROWS = {
    "dp2": list(BODIES),
    "pp2": list(BODIES),
    "tp2": [name for name in BODIES if name != "muon_and_adamw"],
    "zero1": ["twice", "both_forwards_first", "cleared_late", "never_cleared", "thrice_scaled"],
    "zero2": ["twice", "both_forwards_first", "cleared_late", "never_cleared"],
    "zero3": ["twice", "both_forwards_first", "cleared_late", "never_cleared"],
}

CASES = [(name, layout) for layout in ROWS for name in ROWS[layout]]


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{layout}-{name}": user_loops.tried(layout, BODIES[name]) for name, layout in cases}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size, rows in ((1, [(name, "one") for name in BODIES]), (2, chosen(request, CASES))):
        folder = tmp_path_factory.mktemp("loops")
        options = {"init_group": world_size > 1, "env": ENV, "timeout": 200.0}
        found |= run_ranks(main, world_size, rows, tmp_path=folder, **options)[0]
    return found


# Loops meet stages and shards in turns, and copies in place of parts.
TURNS = (("zero1", "zero2", "dp2"), ("pp2", "tp2"))


@pytest.mark.parametrize(("name", "layout"), thinned(CASES, TURNS))
def test_a_loop_trains_as_on_one_process(name: str, layout: str, runs: dict[str, Any]) -> None:
    case = f"{layout}-{name}"
    if name == "muon_and_adamw":  # whose update is computed in bf16: rounding of the last bit is 3e-3 of it
        assert runs[case]["history"] == pytest.approx(runs[f"one-{name}"]["history"], rel=1e-5)
    else:
        assert user_loops.difference(runs[case], runs[f"one-{name}"]) < 1e-5


def unreduced(rank: int, world_size: int) -> None:
    loop = Loop("dp2")
    loop.prepare()
    parameters = list(loop.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loop.loss(0), parameters), strict=True):
        parameter.grad = gradient
    loop.step()


def test_a_step_on_gradients_that_nobody_reduced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="never reduced"):
        run_ranks(unreduced, 2, tmp_path=tmp_path, env=ENV)
