"""Rows, views and sums along one dimension of `p.grad`: those of the whole gradient, also where ranks hold shards of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import user_loops
from rank_runner import run_ranks
from torch import Tensor
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


def matrices(loop: Loop) -> Iterator[Tensor]:
    return (p.grad for p in loop.model.parameters() if p.grad is not None and p.ndim > 1)


def rows(loop: Loop) -> None:
    for gradient in matrices(loop):
        gradient[:3] = 0
        gradient[-1].mul_(0.5)


def columns(loop: Loop) -> None:
    for gradient in matrices(loop):
        gradient[:, 5].zero_()
        gradient.select(1, 2).mul_(3)
        gradient.mul_(0.7)


def chosen(loop: Loop) -> None:
    for gradient in matrices(loop):
        gradient[torch.tensor([0, 9, 13])] *= 0.1


def masked(loop: Loop) -> None:
    """Only the new tokens are trained."""
    gradient = loop.named()["model.embed_tokens.weight"].grad
    mask = torch.zeros(99, 1)
    mask[90:] = 1
    gradient.mul_(mask)


def centred(loop: Loop) -> None:
    for gradient in matrices(loop):
        gradient.sub_(gradient.mean(1, keepdim=True))
        gradient.sub_(gradient.mean(dim=0, keepdim=True))


def units(loop: Loop) -> None:
    """Every row is limited by its own norm."""
    for gradient in matrices(loop):
        gradient.div_(1 + 10 * gradient.norm(dim=1, keepdim=True))
        gradient.div_(1 + gradient.norm(dim=0))


def flattened(loop: Loop) -> None:
    found = list(matrices(loop))
    norms = [torch.cat([g.flatten()]).norm() + g.reshape(-1).dot(g.view(-1)).sqrt() for g in found]
    for gradient, norm in zip(found, norms, strict=True):
        gradient.div_(1 + 5 * norm)


def largest(loop: Loop) -> None:
    for gradient in matrices(loop):
        gradient.div_(1 + gradient.abs().amax(dim=1, keepdim=True) + gradient.max(0).values)


def added(loop: Loop) -> None:
    """A norm that is added up from numbers."""
    found = [p.grad for p in loop.model.parameters() if p.grad is not None]
    norm = sum(float(gradient.pow(2).sum()) for gradient in found) ** 0.5
    for gradient in found:
        gradient.mul_(0.2 / norm)


BODIES: dict[str, Callable[[Loop], None]] = {
    body.__name__: body for body in (rows, columns, chosen, masked, centred, units, flattened, largest, added)
}
LAYOUTS = ("tp2", "zero1", "pp2", "zero3")
# Numbers of one stage cannot be added up to those of the model; DTensor has no rows that can be written to.
CASES = [(name, layout) for name in BODIES for layout in LAYOUTS[:2]]
CASES += [(name, "pp2") for name in BODIES if name != "added"] + [
    ("added", "zero3"),
    ("centred", "zero3"),
    ("units", "zero3"),
]


def trained(change: Callable[[Loop], None]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            loop.backward(step)
            change(loop)
            loop.history.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)))
            loop.step()

    return body


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{name}-{layout}": user_loops.tried(layout, trained(BODIES[name])) for name, layout in cases}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size, cases in ((1, [(name, "one") for name in BODIES]), (2, CASES)):
        folder = tmp_path_factory.mktemp("attacks")
        options = {"init_group": world_size > 1, "env": ENV, "timeout": 200.0}
        found |= run_ranks(main, world_size, cases, tmp_path=folder, **options)[0]
    return found


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_parts_of_gradients(name: str, layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{name}-{layout}"], runs[f"{name}-one"]) < 1e-5
