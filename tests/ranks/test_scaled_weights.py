"""Loops of users that multiply each weight, or change its gradient, by a norm of it, of which a shard has its own: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from user_loops import Loop


pytestmark = [pytest.mark.timeout(200), pytest.mark.long]


def after_each_step(change: Callable[[torch.nn.Parameter], None]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for index in range(user_loops.STEPS):
            loop.backward(index)
            loop.step()
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    change(parameter)

    return body


def normalised(p: torch.nn.Parameter) -> None:
    p.data.div_(p.norm())


def assigned(p: torch.nn.Parameter) -> None:
    p.data = p.data / p.data.norm()


def limited_rows(p: torch.nn.Parameter) -> None:
    if p.ndim > 1:
        p.renorm_(2, 0, 0.05)


def normalised_columns(p: torch.nn.Parameter) -> None:
    if p.ndim > 1:
        p.data.div_(p.norm(dim=0, keepdim=True))


def decayed(p: torch.nn.Parameter) -> None:
    p.data.mul_(0.9)


def clamped(p: torch.nn.Parameter) -> None:
    """Of some lines every element, of some none: on each rank of others."""
    p.data.mul_(0.9).clamp_(-0.05, 0.05)


def pruned(p: torch.nn.Parameter) -> None:
    p.data.mul_(p.abs() > 0.02)


def moved(p: torch.nn.Parameter) -> None:
    p.data.lerp_(p.data.sign(), 1e-3)


def before_each_step(change: Callable[[torch.nn.Parameter], None]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for index in range(user_loops.STEPS):
            loop.backward(index)
            for parameter in loop.model.parameters():
                change(parameter)
            loop.step()

    return body


def without_radius(p: torch.nn.Parameter) -> None:
    """As optimizers on spheres do: nothing of the gradient along the weight is left."""
    weight = p.detach()
    p.grad.sub_(weight * ((weight * p.grad).sum() / weight.norm() ** 2))


def added(p: torch.nn.Parameter) -> None:
    p.grad = p.grad + p.detach() / p.detach().norm()


def by_size(p: torch.nn.Parameter) -> None:
    p.grad.mul_(p.detach().abs() / p.detach().abs().mean().clamp(min=1e-3))


def by_filled(p: torch.nn.Parameter) -> None:
    p.grad.mul_(torch.zeros_like(p) + p.detach().norm())


def decays(p: torch.nn.Parameter) -> None:
    p.grad.add_(p.detach() * 0.1).add_(p.detach(), alpha=0.01)


def masked(p: torch.nn.Parameter) -> None:
    """In some lines on one rank only."""
    p.grad.mul_((p.detach().abs() > 0.02).float())


def limited(p: torch.nn.Parameter) -> None:
    p.grad.add_((p.detach() * 0.5).clamp(-0.02, 0.02))


def into_itself(p: torch.nn.Parameter) -> None:
    torch.mul(p.grad, 1 / (1 + p.grad.norm(dim=0)), out=p.grad)


def in_the_last_step(loop: Loop) -> None:
    loop.prepare()
    loop.backward(0)
    loop.step()
    for parameter in loop.model.parameters():
        normalised(parameter)
    loop.accelerator.wait_for_everyone()


REFUSED = (normalised, assigned, limited_rows, normalised_columns)
RIGHT = (decayed, clamped, pruned, moved)
REFUSED_GRADIENTS = (without_radius, added, by_size, by_filled)
RIGHT_GRADIENTS = (decays, masked, limited, into_itself)
BODIES = {change.__name__: after_each_step(change) for change in (*REFUSED, *RIGHT)}
BODIES |= {change.__name__: before_each_step(change) for change in (*REFUSED_GRADIENTS, *RIGHT_GRADIENTS)}
BODIES["in_the_last_step"] = in_the_last_step
NAMES = sorted(BODIES)
FEW = (normalised, decayed, clamped, without_radius, limited)
CASES = user_loops.cases_by_size(NAMES, FEW)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return user_loops.launched_by_size(__name__, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("size", "name", "layout"), [(size, name, layout) for size, cases in CASES.items() for name, layout in cases]
)
def test_weights_multiplied_by_numbers_of_parts_are_refused_and_those_changed_as_in_one_process_train(
    size: int, name: str, layout: str, found: dict[int, list[dict[str, Any]]]
) -> None:
    is_refused = all(change.__name__ != name for change in (*RIGHT, *RIGHT_GRADIENTS))
    user_loops.check(found[size], name, layout, "by numbers that differ between ranks" if is_refused else "")
    assert not is_refused or len({ranks[f"{name}-{layout}"].split(" File")[0] for ranks in found[size]}) == 1
