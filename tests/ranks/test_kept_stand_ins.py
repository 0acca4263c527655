"""Gradients that user code changes between the batches of a step, in one batch and not in the next, are those of one process.

If a row fails, a stand-in that is kept from batch to batch stands for what its gradient was before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import user_loops
from rank_runner import run_ranks
from user_loops import Loop
from user_steps import ENV


pytestmark = pytest.mark.long

LAYOUTS = ("tp2", "pp2")
NUM_BATCHES = 5


def touch(loop: Loop, batch: int) -> None:
    """A change of another kind after each batch; none after the first and the last but one."""
    for name, parameter in loop.named().items():
        if batch == 1 and "norm" in name:
            parameter.grad.mul_(0.5)
        elif batch == 1 and "mlp" in name:
            parameter.grad[1] = 0.25
        elif batch == 2 and "self_attn" in name:
            parameter.grad = parameter.grad * 0.5
        elif batch == 2 and "layernorm" in name:
            parameter.grad = None
        elif batch == 2 and "mlp" in name:
            parameter.grad.add_(parameter.grad.detach())


def windows(loop: Loop) -> None:
    loop.prepare()
    for step in range(2):
        for batch in range(NUM_BATCHES):
            loop.accelerator.gradient_state._set_sync_gradients(batch == NUM_BATCHES - 1)
            loop.backward(step * NUM_BATCHES + batch)
            if batch < NUM_BATCHES - 1:
                touch(loop, batch)
        loop.history.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)))
        loop.step()


def main(rank: int, world_size: int, layouts: tuple[str, ...]) -> dict[str, Any]:
    return {layout: user_loops.tried(layout, windows) for layout in layouts}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size, layouts in ((1, ("one",)), (2, LAYOUTS)):
        folder = tmp_path_factory.mktemp("kept")
        found |= run_ranks(main, world_size, layouts, tmp_path=folder, init_group=world_size > 1, env=ENV)[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_changed_between_two_batches_counts_once(layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[layout], runs["one"]) < 1e-5
