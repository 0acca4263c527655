"""Hooks of users on the blocks of a model: in effect once, on the stage that has the block, whenever they were registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import run_ranks
from thinning import chosen, thinned
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
user_loops.LAYOUTS["pp2_interleaved"] = {"pp_size": 2, "num_microbatches": 2, "schedule": "interleaved_1f1b"}
user_loops.LAYOUTS["pp2_v"] = {"pp_size": 2, "num_microbatches": 3, "schedule": "zbv_zero_bubble"}
LAYOUTS = ("pp2", "pp2_interleaved", "pp2_v")


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


def changed_after(change: Callable[[torch.nn.Module], Any]) -> Callable[[Loop], None]:
    """A body that changes every block when the model is prepared."""

    def body(loop: Loop) -> None:
        loop.prepare()
        for block in loop.model.model.layers:
            change(block)
        steps(loop)

    return body


def hidden(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def in_place_unseen(block: torch.nn.Module) -> None:
    """As hooks do under `no_grad`."""

    def grow(module: Any, inputs: Any, output: Any) -> None:
        hidden(output).data.mul_(1.3)

    block.register_forward_hook(grow)


def halved_gradients(block: torch.nn.Module) -> None:
    """Of what the block returns; through a tensor's hook."""

    def watch(module: Any, inputs: Any, output: Any) -> None:
        if hidden(output).requires_grad:
            hidden(output).register_hook(lambda gradient: 0.5 * gradient)

    block.register_forward_hook(watch)


def backward_pre_hook(block: torch.nn.Module) -> None:
    def weaken(module: Any, gradients: Any) -> Any:
        return tuple(0.7 * gradient for gradient in gradients)

    block.register_full_backward_pre_hook(weaken)


def backward_hook(block: torch.nn.Module) -> None:
    def halve(module: Any, to_inputs: Any, to_outputs: Any) -> Any:
        return tuple(None if gradient is None else 0.5 * gradient for gradient in to_inputs)

    block.register_full_backward_hook(halve)


def wrapped_in_place(block: torch.nn.Module) -> None:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        hidden(output).mul_(1.2)
        return output

    block.forward = forward


def other_class(block: torch.nn.Module) -> None:
    """A class whose forward is the old one and more."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return louder(self, None, kind.forward(self, *args, **kwargs))

    kind: Any = type(block)
    block.__class__ = type("Louder", (kind,), {"forward": forward})


def steps(loop: Loop) -> None:
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


def backward_before(loop: Loop) -> None:
    for block in loop.model.model.layers:
        backward_pre_hook(block)
        backward_hook(block)
    loop.prepare()
    steps(loop)


CHANGES = (in_place_unseen, halved_gradients, backward_pre_hook, backward_hook, wrapped_in_place, other_class)
BODIES: dict[str, Callable[[Loop], None]] = {body.__name__: body for body in (before, after, removed, backward_before)}
BODIES |= {change.__name__: changed_after(change) for change in CHANGES}


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    def build() -> Any:
        return tiny.llama(tied=True)

    return {f"{layout}-{name}": user_loops.tried(layout, BODIES[name], build=build) for name, layout in cases}


CASES = [(name, layout) for name in BODIES for layout in LAYOUTS]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("hooks")
    alone = run_ranks(
        main, 1, [(name, "one") for name in BODIES], tmp_path=folder, env=ENV, init_group=False, timeout=200.0
    )[0]
    return alone | run_ranks(main, 2, chosen(request, CASES), tmp_path=folder, env=ENV, timeout=200.0)[0]


# Two schedules that give a rank several stages take turns.
@pytest.mark.parametrize(("name", "layout"), thinned(CASES, [("pp2_interleaved", "pp2_v")]))
def test_a_hook_on_a_block_is_in_effect_once(name: str, layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{layout}-{name}"], runs[f"one-{name}"]) < 1e-5
    assert torch.isfinite(torch.tensor(runs[f"one-{name}"]["history"])).all()
