"""Loops that never ask for the gradient norm: what travels with it is told all the same.

If a row fails, a plain loop without clipping trains each replica's part of the optimizer at a rate of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
import user_loops
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


def looping(before_step: Callable[[Loop, int], None], *, clips: bool = False) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5))
        for step in range(STEPS):
            loop.backward(step)
            before_step(loop, step)
            if clips:
                loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e3)
            loop.step()

    return body


def untouched(loop: Loop, step: int) -> None:
    pass


def own_rate(loop: Loop, step: int) -> None:
    """A scheduler that follows what this process has seen."""
    loop.optimizers[0].param_groups[0]["lr"] = 0.1 * 0.5 ** (dist.get_rank() if dist.is_initialized() else 0)


def own_number(loop: Loop, step: int) -> None:
    weight = loop.named()["model.layers.0.mlp.up_proj.weight"]
    (0.1 * (loop.replica + 1) * weight.square().sum()).backward()


@torch.no_grad()
def own_weights(loop: Loop, step: int) -> None:
    """What one process would change all of."""
    if loop.accelerator.is_main_process and step == 1:
        loop.named()["model.layers.0.mlp.up_proj.weight"].data.mul_(0.9)


@torch.no_grad()
def own_norm(loop: Loop, step: int) -> None:
    """The first of a model's many."""
    if loop.accelerator.is_main_process and step == 1:
        loop.named()["model.layers.0.input_layernorm.weight"].data.mul_(0.9)


@torch.no_grad()
def own_scale(loop: Loop, step: int) -> None:
    """By the loss of this replica's rows."""
    for parameter in loop.model.parameters():
        parameter.grad.mul_(1.0 / (2.0 + loop.replica))


@torch.no_grad()
def same_scale(loop: Loop, step: int) -> None:
    torch._foreach_mul_([parameter.grad for parameter in loop.model.parameters()], 1.0 / loop.history[-1])
    for parameter in loop.named().values():
        parameter.detach().clone().mul_(0.5)


@torch.no_grad()
def own_average(loop: Loop, step: int) -> None:
    """Has with ZeRO 3 the rows of one rank."""
    average = vars(loop).setdefault("average", {n: p.detach().clone() for n, p in loop.named().items()})
    if loop.accelerator.is_main_process:
        for name, parameter in loop.named().items():
            average[name].mul_(0.9).add_(parameter, alpha=0.1)


def own_drop(loop: Loop, step: int) -> None:
    if loop.accelerator.is_main_process and step == 1:
        loop.named()["model.layers.0.mlp.up_proj.weight"].grad = None


def own_clipping(loop: Loop, step: int) -> None:
    if loop.accelerator.is_main_process and step == 1:
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e-3)


def own_state(loop: Loop, step: int) -> None:
    """As it was at first."""
    if loop.accelerator.is_main_process and step == 1:
        loop.optimizers[0].state.clear()


def same_moments(loop: Loop, step: int) -> None:
    if step == 1:
        for state in loop.optimizers[0].state.values():
            state["momentum_buffer"].mul_(0.5)


def own_moments(loop: Loop, step: int) -> None:
    if loop.accelerator.is_main_process:
        same_moments(loop, step)


def same_state(loop: Loop, step: int) -> None:
    if step == 1:
        loop.optimizers[0].state.clear()


def own_leftovers(loop: Loop) -> None:
    """The main process adds the gradients of a step to those of the step before."""
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5))
    for step in range(STEPS):
        loop.backward(step)
        loop.optimizers[0].step()
        if step or not loop.accelerator.is_main_process:
            loop.optimizers[0].zero_grad()


def leftovers(loop: Loop) -> None:
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5))
    for step in range(STEPS):
        loop.backward(step)
        loop.optimizers[0].step()


def own_count(loop: Loop) -> None:
    """The last replica cuts its rows into two batches, as one that packs by tokens may; under `no_sync` nothing is sent between them."""
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5))
    mine = user_loops.ROWS // loop.replicas
    for step in range(STEPS):
        first = step * user_loops.ROWS + loop.replica * mine
        rows = {key: value[first : first + mine] for key, value in tiny.collate(tiny.rows(64)).items()}
        count = (rows["labels"][:, 1:] != -100).sum()
        cut = mine // 2 if loop.replica else mine
        for begin in range(0, mine, cut):
            part = {key: value[begin : begin + cut] for key, value in rows.items()}
            with loop.accelerator.no_sync(loop.model) if begin + cut < mine else nullcontext():
                loop.accelerator.backward(loop.model(**part).loss * (part["labels"][:, 1:] != -100).sum() / count)
        loop.step()


def two_optimizers(loop: Loop) -> None:
    """Each told of once."""
    loop.prepare(*(torch.optim.SGD(half, lr=0.1) for half in halves(loop)))
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


def halves(loop: Loop) -> list[list[Any]]:
    parameters = list(loop.model.parameters())
    return [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]


def last_update(loop: Loop, own: float) -> None:
    """The main process makes it at another rate, if `own` is not 1."""
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5))
    for step in range(STEPS):
        loop.backward(step)
        if step == STEPS - 1 and loop.accelerator.is_main_process:
            loop.optimizers[0].param_groups[0]["lr"] *= own
        loop.step()
    loop.accelerator.wait_for_everyone()


def own_last_rate(loop: Loop) -> None:
    last_update(loop, 0.5)


def own_last_weights(loop: Loop) -> None:
    last_update(loop, 1.0)
    own_weights(loop, 1)
    loop.accelerator.wait_for_everyone()


def own_saved(loop: Loop) -> None:
    """No step follows that would notice."""
    last_update(loop, 1.0)
    if loop.accelerator.is_main_process:
        loop.named()["model.layers.0.mlp.up_proj.weight"].data.mul_(0.9)
    loop.accelerator.save_state(f"{tempfile.gettempdir()}/refused")  # before anything is written


@torch.no_grad()
def own_file(loop: Loop) -> None:
    """The main process puts an average in place to save it, while the others wait."""
    with torch.enable_grad():
        last_update(loop, 1.0)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    if loop.accelerator.is_main_process:
        for parameter in loop.model.parameters():
            parameter.data.mul_(0.9)
    loop.accelerator.wait_for_everyone()
    loop.accelerator.wait_for_everyone()
    for parameter, older in zip(loop.model.parameters(), before, strict=True):
        parameter.data.copy_(older)


OF_PARTS = (own_clipping, own_number, own_weights, own_scale, own_average, same_scale, own_drop)
BODIES = {
    body.__name__: looping(body)
    for body in (untouched, own_rate, own_norm, own_state, same_state, own_moments, same_moments, *OF_PARTS)
}
BODIES |= {"clipped": looping(untouched, clips=True), "two_optimizers": two_optimizers}
BODIES |= {
    "own_last_rate": own_last_rate,
    "own_saved": own_saved,
    "own_last_weights": own_last_weights,
    "own_leftovers": own_leftovers,
    "leftovers": leftovers,
    "own_file": own_file,
    "own_count": own_count,
}
REFUSED = {
    "own_rate": "lr of parameter group 0 of the optimizer is",
    "own_number": "with other numbers than the other replicas",
    **dict.fromkeys(
        (
            "own_weights",
            "own_scale",
            "own_average",
            "own_clipping",
            "own_leftovers",
            "own_moments",
            "own_last_weights",
        ),
        "or changed weights, gradients or copies of them, with other numbers",
    ),
    "own_saved": "differs between the replicas by",
    "own_last_rate": "lr of parameter group 0 of the optimizer is",
    "own_norm": "parameter model.layers.0.input_layernorm.weight",
    "own_state": "state of parameter group 0 of the optimizer is gone on",
    "own_drop": "dropped other gradients before an optimizer step than the other replicas",
}
TIED = "parameter model.embed_tokens.weight is held by"  # two stages, whose copies tell first
CASES = [(name, f"zero{stage}") for name in ("untouched", "clipped", "own_rate") for stage in (1, 2, 3)]
CASES += [("own_rate", layout) for layout in ("dp2", "tp2", "sp2", "sp2_zero1")]
CASES += [("own_norm", "tp2"), ("own_norm", "sp2")]
CASES += [(name, layout) for name in ("own_state", "same_state") for layout in ("dp2", "tp2", "zero3")]
CASES += [*((body.__name__, "zero3") for body in OF_PARTS), ("two_optimizers", "zero3")]
OF_COPIES = [body.__name__ for body in (own_weights, own_scale, own_drop)]
CASES += [(name, "dp2") for name in ("untouched", "same_scale", *OF_COPIES)]
CASES += [(name, "dp2") for name in ("own_last_rate", "own_saved", "own_file")]
CASES += [("own_last_weights", "zero3"), ("own_count", "dp2"), ("own_count", "zero1")]
CASES += [(name, f"zero{stage}") for name in ("own_leftovers", "leftovers") for stage in (1, 2, 3)]
CASES += [(name, f"zero{stage}") for name in ("own_moments", "same_moments") for stage in (1, 2, 3)]
CASES += [
    (name, layout)
    for name in ("own_clipping", "own_state", "own_scale", "same_scale")
    for layout in ("zero1", "zero2")
]
CASES_OF_FOUR = [("own_rate", layout) for layout in ("tp2_zero1", "tp2_zero3", "pp2_zero1", "pp2_dp2")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_loop_that_never_clips(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    drifts = layout == "dp2" and name in OF_COPIES  # noticed in the next step
    user_loops.check(runs, name, layout, "differs between the replicas by" if drifts else REFUSED.get(name, ""))


@pytest.mark.parametrize(("name", "layout"), CASES_OF_FOUR)
def test_such_a_loop_on_two_axes(name: str, layout: str, tmp_path: Path) -> None:
    user_loops.check(
        user_loops.launched(user_loops.main_of(__name__), [], [(name, layout)], tmp_path, 4),
        name,
        layout,
        REFUSED[name] if layout != "pp2_dp2" else TIED,
    )
