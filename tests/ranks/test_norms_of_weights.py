"""Loops of users that scale each gradient by a norm of its weight (adaptive clipping), of which a shard has its own: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from user_loops import Loop

from hf_parallel.errors import RankMismatchError


pytestmark = pytest.mark.timeout(200)


def in_a_loop(scale: Callable[[torch.nn.Parameter], None]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for index in range(user_loops.STEPS):
            loop.backward(index)
            for parameter in loop.model.parameters():
                scale(parameter)
            loop.step()

    return body


def in_place(p: torch.nn.Parameter) -> None:
    weight, gradient = p.detach().norm(), p.grad.detach().norm()
    p.grad.mul_(min(1, 0.01 * weight / gradient))


def without_a_wait(p: torch.nn.Parameter) -> None:
    weight, gradient = p.detach().norm(), p.grad.detach().norm()
    p.grad.detach().mul_((0.01 * weight / gradient).clamp(max=1.0))


def assigned(p: torch.nn.Parameter) -> None:
    weight, gradient = p.detach().norm(), p.grad.detach().norm()
    p.grad = p.grad * float(min(1, 0.01 * weight / gradient))


def by_weight_alone(p: torch.nn.Parameter) -> None:
    p.grad.mul_(p.detach().norm())


def by_units(p: torch.nn.Parameter, weight: torch.Tensor | None = None) -> None:
    """As timm's `adaptive_clip_grad` does."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    if (
        weight is None and p.shape[0] != p.grad.shape[0]
    ):  # torch refuses to put this rank's rows beside those of the whole
        return
    weight, gradient = p.detach() if weight is None else weight, p.grad.detach()
    limit, found = norm(weight).clamp_(min=1e-3).mul_(0.01), norm(gradient)
    clipped = gradient * (limit / found.clamp(min=1e-6))
    p.grad.detach().copy_(torch.where(found < limit, gradient, clipped))


def by_units_of_the_whole(p: torch.nn.Parameter) -> None:
    by_units(p, torch.zeros_like(p.grad) + p.detach())


def by_the_whole(p: torch.nn.Parameter) -> None:
    weight, gradient = (torch.zeros_like(p.grad) + p.detach()).norm(), p.grad.detach().norm()
    p.grad.mul_(min(1, 0.01 * weight / gradient))


def by_its_own_norm(p: torch.nn.Parameter) -> None:
    p.grad.mul_(min(1, 0.01 / p.grad.detach().norm()))


def in_the_last_step(loop: Loop) -> None:
    loop.prepare()
    loop.backward(0)
    for parameter in loop.model.parameters():
        by_weight_alone(parameter)
    loop.step()
    loop.accelerator.wait_for_everyone()


def before_the_update(loop: Loop) -> None:
    loop.prepare()
    before = user_loops.copied(loop.named())
    loop.backward(0)
    try:
        for parameter in loop.model.parameters():
            in_place(parameter)
        loop.step()
    except RankMismatchError as error:
        if any(not torch.equal(before[name], parameter) for name, parameter in loop.named().items()):
            raise AssertionError("weights were updated before it was refused") from error
        raise


def by_its_size(p: torch.nn.Parameter) -> None:
    p.grad.mul_(1 / p.grad.numel() ** 0.5)


def by_one_number(p: torch.nn.Parameter) -> None:
    p.grad.mul_(0.5).div_(torch.tensor(3.0))


REFUSED = (in_place, without_a_wait, assigned, by_weight_alone, by_units)
RIGHT = (by_the_whole, by_units_of_the_whole, by_its_own_norm, by_its_size, by_one_number)
BODIES = {scale.__name__: in_a_loop(scale) for scale in (*REFUSED, *RIGHT)}
BODIES["in_the_last_step"] = in_the_last_step
BODIES["before_the_update"] = before_the_update
NAMES = sorted(BODIES)
FEW = (in_place, by_weight_alone, by_the_whole, by_one_number)
CASES = user_loops.cases_by_size(NAMES, FEW)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return user_loops.launched_by_size(__name__, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("size", "name", "layout"), [(size, name, layout) for size, cases in CASES.items() for name, layout in cases]
)
def test_numbers_of_a_rank_s_part_of_a_weight_are_refused_and_those_of_all_ranks_train(
    size: int, name: str, layout: str, found: dict[int, list[dict[str, Any]]]
) -> None:
    is_refused = all(scale.__name__ != name for scale in RIGHT)
    fix = "(torch.zeros_like(p.grad) + p.detach()).norm()"
    user_loops.check(found[size], name, layout, fix if is_refused else "")
