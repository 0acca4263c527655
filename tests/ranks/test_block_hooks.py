"""Forward hooks of users on the blocks of a model: in effect once, on the stage that has the block, whenever they were registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import run_ranks
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
user_loops.LAYOUTS["pp2_interleaved"] = {"pp_size": 2, "num_microbatches": 2, "schedule": "interleaved_1f1b"}
LAYOUTS = ("pp2", "pp2_interleaved")


def louder(module: Any, inputs: Any, output: Any) -> Any:
    return (output[0] * 1.3, *output[1:]) if isinstance(output, tuple) else output * 1.3


def shifted(module: Any, inputs: Any) -> Any:
    return (inputs[0] + 0.1, *inputs[1:])


def before(loop: Loop) -> None:
    for block in loop.model.model.layers[::2]:
        block.register_forward_hook(louder)
        block.register_forward_pre_hook(shifted)
    loop.prepare()
    steps(loop)


def after(loop: Loop) -> None:
    """As a callback does in `on_train_begin`."""
    loop.prepare()
    for block in loop.model.model.layers:
        block.register_forward_hook(louder)
    steps(loop)


def removed(loop: Loop) -> None:
    loop.prepare()
    handles = [block.register_forward_hook(louder) for block in loop.model.model.layers]
    steps(loop)
    for handle in handles:
        handle.remove()
    steps(loop)


def steps(loop: Loop) -> None:
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


BODIES = {body.__name__: body for body in (before, after, removed)}


def main(rank: int, world_size: int, layouts: tuple[str, ...]) -> dict[str, Any]:
    def build() -> Any:
        return tiny.llama(tied=True)

    return {
        f"{layout}-{name}": user_loops.tried(layout, body, build=build)
        for layout in layouts
        for name, body in BODIES.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("hooks")
    alone = run_ranks(main, 1, ("one",), tmp_path=folder, env=ENV, init_group=False, timeout=200.0)[0]
    return alone | run_ranks(main, 2, LAYOUTS, tmp_path=folder, env=ENV, timeout=200.0)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BODIES)
def test_a_hook_on_a_block_is_in_effect_once(layout: str, name: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{layout}-{name}"], runs[f"one-{name}"]) < 1e-5
    assert torch.isfinite(torch.tensor(runs[f"one-{name}"]["history"])).all()
