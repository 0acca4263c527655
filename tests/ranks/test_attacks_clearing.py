"""Gradients that a loop clears, keeps or shrinks by itself after the step or before its backward pass, and parameters frozen in mid-step: as on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_loops
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


def forget(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def clear(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def shrink(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def read(model: Any) -> None:
    norms = [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]
    assert len(norms) == len(list(model.parameters()))
    model.zero_grad()


def after_steps(change: Callable[[Any], None], *, before_forward: bool = False) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            if before_forward:
                change(loop.model)
            loop.backward(step)
            loop.optimizers[0].step()
            if not before_forward:
                change(loop.model)

    return body


def between(change: Callable[[Any], None], *, accumulates: bool = False) -> Callable[[Loop], None]:
    """The forward pass of a step has run, its backward pass has not; gradients are those of the step or batch before."""

    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            if accumulates:
                with loop.accelerator.no_sync(loop.model):
                    loop.backward(step)
            loss = loop.loss(step + 1)
            change(loop.model)
            loop.accelerator.backward(loss)
            loop.optimizers[0].step()
            if accumulates:
                loop.optimizers[0].zero_grad()

    return body


def kept(change: Callable[[Any], None]) -> Callable[[Loop], None]:
    """Nobody clears gradients after a step; those of the next step are added to them, and changed between its batches."""

    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            with loop.accelerator.no_sync(loop.model):
                loop.backward(step)
            change(loop.model)
            loop.backward(step + 1)
            loop.optimizers[0].step()

    return body


def cleared_late(loop: Loop) -> None:
    """`zero_grad` at the head of the loop: while batches accumulate accelerate passes it over, and before the last it clears."""
    loop.prepare()
    for step in range(STEPS):
        for batch in range(2):
            loop.accelerator.gradient_state._set_sync_gradients(batch == 1)
            loop.optimizers[0].zero_grad()
            loop.backward(2 * step + batch)
            loop.optimizers[0].step()


def clear_all(model: Any) -> None:
    model.zero_grad()


def clear_part(model: Any) -> None:
    model.get_input_embeddings().zero_grad()


def assign(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)


def shown(loop: Loop) -> None:
    """After the optimizer's `zero_grad` no parameter has a gradient."""
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        loop.step()
        assert all(parameter.grad is None for parameter in loop.model.parameters())


def frozen(loop: Loop) -> None:
    """Between two batches of a step; the first has given the parameter a gradient."""
    loop.prepare()
    for step in range(STEPS):
        with loop.accelerator.no_sync(loop.model):
            loop.backward(step)
        if step == 1:
            loop.model.get_input_embeddings().weight.requires_grad_(False)
        loop.backward(step + 1)
        loop.step()


BODIES: dict[str, Callable[[Loop], None]] = {
    "forgotten": after_steps(forget),
    "forgotten_before": after_steps(forget, before_forward=True),
    "cleared": after_steps(clear),
    "cleared_before": after_steps(clear, before_forward=True),
    "shrunk": after_steps(shrink),
    "kept": after_steps(lambda model: None),
    "read": after_steps(read),
    "shown": shown,
    "frozen": frozen,
    "forgotten_between": between(forget),
    "cleared_between": between(clear),
    "cleared_all_between": between(clear_all),
    "cleared_part_between": between(clear_part),
    "shrunk_between": between(shrink),
    "assigned_between": between(assign),
    "forgotten_within": between(forget, accumulates=True),
    "shrunk_within": between(shrink, accumulates=True),
    "kept_within": kept(lambda model: None),
    "kept_shrunk": kept(shrink),
    "kept_cleared": kept(clear),
    "kept_forgotten": kept(forget),
    "cleared_late": cleared_late,
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "forgotten": ("zero1", "zero3"),
    "cleared": ("zero2",),
    "shrunk": ("zero1", "pp2"),
    "read": ("zero1",),
    "shown": ("zero1",),
    "frozen": ("dp2", "zero2"),
    "forgotten_between": ("zero3",),
    "assigned_between": ("zero3",),
    "shrunk_within": ("zero3",),
    "kept_shrunk": ("dp2", "zero1", "pp2"),
    "kept_forgotten": ("zero1",),
    "cleared_late": ("dp2",),
}
MORE: dict[str, tuple[str, ...]] = {
    "forgotten": ("zero2", "pp2", "zero1_offload"),
    "forgotten_before": ("zero1",),
    "cleared": ("zero1", "tp2"),
    "cleared_before": ("zero1_offload", "zero3"),
    "shrunk": ("tp2",),
    "kept": ("zero1", "pp2"),
    "read": ("tp2",),
    "frozen": ("zero1", "pp2", "tp2"),
    "forgotten_between": ("dp2", "zero1", "zero2", "pp2", "tp2"),
    "cleared_between": ("zero3", "zero1"),
    "cleared_all_between": ("zero3", "zero1", "pp2"),
    "cleared_part_between": ("zero3", "zero1"),
    "shrunk_between": ("zero3", "zero1"),
    "assigned_between": ("dp2",),
    "forgotten_within": ("dp2", "zero1", "zero2", "zero3", "pp2", "tp2"),
    "shrunk_within": ("dp2", "zero1", "zero2", "pp2"),
    "kept_within": ("dp2", "zero1", "zero2", "zero3", "zero1_offload", "pp2", "tp2"),
    "kept_shrunk": ("zero2", "zero3", "zero1_offload", "tp2"),
    "kept_cleared": ("dp2", "zero1", "zero2", "zero3", "pp2"),
    "kept_forgotten": ("dp2", "zero2", "zero3", "pp2", "tp2"),
    "cleared_late": ("zero1", "zero2", "zero3", "pp2", "tp2"),
}


def cases(layouts: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, layout) for name, each in layouts.items() for layout in each]


def main(rank: int, world_size: int, wanted: list[tuple[str, str]]) -> dict[str, Any]:
    torch.manual_seed(0)
    return user_loops.all_tried(BODIES, wanted)


def runs_of(layouts: dict[str, tuple[str, ...]], folder: Path) -> list[dict[str, Any]]:
    return user_loops.launched(main, layouts, cases(layouts), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return runs_of(LAYOUTS, tmp_path_factory.mktemp("clearing"))


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return runs_of(MORE, tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize(("name", "layout"), cases(LAYOUTS))
def test_gradients_that_a_loop_changes(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, "")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "layout"), cases(MORE))
def test_gradients_that_a_loop_changes_in_more_layouts(
    name: str, layout: str, more_runs: list[dict[str, Any]]
) -> None:
    user_loops.check(more_runs, name, layout, "")
