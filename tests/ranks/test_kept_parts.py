"""A loss that reads what a hook kept of a part of the sequence is refused; hooks that change or only look at it train as alone.

If a row fails, a term that users add to their loss is one of half of the tokens, and trains without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import user_loops
from torch import Tensor, nn
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long

user_loops.LAYOUTS["tp2_shared_sequence"] = {"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}}
LAYOUTS = ("sp2", "tp2_shared_sequence")


def straight_through(hidden: Tensor) -> Tensor:
    """One on every rank, and a gradient."""
    chosen = hidden.mean((0, 1)).softmax(-1)
    return 1 + (chosen.log() - chosen.log().detach()).sum()


def small(hidden: Tensor) -> Tensor:
    return 1e-6 * hidden.pow(2).mean()


def whole_mean(hidden: Tensor) -> Tensor:
    return 0.1 * hidden.pow(2).mean()


def looked_at(hidden: Tensor) -> Tensor:
    return hidden.detach().norm() * 0


def changed(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.1


def changed_in_place(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(1.1)


def keeps(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    kept.append(output)


def hooked(kept: list[Tensor], name: str) -> Any:
    hook, _, checkpointing = CASES[name]
    block = int(name in WHOLE)
    model = tiny.llama(tied=True, layers=2)
    # A deep copy of a module has the same functions, and copies of objects that hold what they have kept.
    held = functools.partial(hook, kept) if name in COPIED else lambda *called: hook(kept, *called)
    model.model.layers[block].register_forward_hook(held)
    if name in COPIED:
        model(**tiny.collate(tiny.rows(2)))  # it holds a result with a graph before it is prepared
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def training(loop: Loop, kept: list[Tensor], term: Callable[[Tensor], Tensor] | None) -> None:
    loop.prepare()
    loop.model.train()
    for step in range(STEPS):
        kept.clear()
        loss = loop.loss(step)
        loop.accelerator.backward(loss if term is None else loss + term(kept[-1]))
        loop.step()


CASES: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor] | None, bool]] = {
    "equal_values": (keeps, straight_through, False),
    "small": (keeps, small, False),
    "looked_at": (keeps, looked_at, False),
    "checkpointed": (keeps, looked_at, True),
    "last_block": (keeps, whole_mean, False),
    "partial_small": (keeps, small, False),
    "partial_looked_at": (keeps, looked_at, False),
    "changed": (changed, None, False),
    "changed_in_place": (changed_in_place, None, False),
}
REFUSED = ("equal_values", "small", "partial_small")
COPIED = ("partial_small", "partial_looked_at")
WHOLE = ("last_block",)  # which returns the whole sequence, but for sp


def main(rank: int, world_size: int, layouts: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        for name, (_, term, _) in CASES.items():
            kept: list[Tensor] = []
            build = functools.partial(hooked, kept, name)
            body = functools.partial(training, kept=kept, term=term)
            found[f"{layout}-{name}"] = user_loops.tried(layout, body, build=build)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return user_loops.alone_and_together(main, LAYOUTS, tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_on_what_a_hook_kept_of_a_part_is_refused(layout: str, name: str, runs: Any) -> None:
    ranks, alone = runs
    found = [mine[f"{layout}-{name}"] for mine in ranks]
    if name in REFUSED or (name in WHOLE and layout == "sp2"):
        for text in found:
            assert "the loss reads what a hook (" in text
            assert f"kept of model.layers.{int(name in WHOLE)}, with " in text
    else:
        assert user_loops.difference(found[0], alone[f"one-{name}"]) < 1e-5


def test_numbers_of_torch() -> None:
    """What it rests on: one reader gets its own gradient through, and two get a tensor of their sum."""
    source = torch.ones(3, requires_grad=True) * 2
    first = source.view_as(source)
    arrived: list[Tensor] = []
    passed: list[Tensor] = []
    first.register_hook(arrived.append)
    source.register_hook(passed.append)
    first.sum().backward(retain_graph=True)
    assert arrived[0].data_ptr() == passed[0].data_ptr()
    (first.sum() + source.sum()).backward()
    assert arrived[1].data_ptr() != passed[1].data_ptr()
