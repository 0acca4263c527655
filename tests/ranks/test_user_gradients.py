"""User code that clips, masks, scales, replaces or reads gradients between backward and step: on every layout as on one
process, whether a rank has all gradients, those of a stage, shards of them, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from rank_runner import run_ranks
from thinning import FAMILIES, chosen, thinned
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


def clip(loop: Loop) -> None:
    loop.history.append(float(clip_grad_norm_(loop.model.parameters(), 0.3)))


def clip_foreach(loop: Loop) -> None:
    loop.history.append(float(clip_grad_norm_(loop.model.parameters(), 0.3, foreach=True)))


def clip_largest(loop: Loop) -> None:
    loop.history.append(float(clip_grad_norm_(loop.model.parameters(), 0.01, norm_type=float("inf"))))


def clip_by_hand(loop: Loop) -> None:
    """As Megatron's and many older scripts do."""
    gradients = [p.grad.detach() for p in loop.model.parameters() if p.grad is not None]
    norm = torch.norm(torch.stack([torch.norm(gradient, 2.0) for gradient in gradients]), 2.0)
    assert float(get_total_norm(gradients)) == pytest.approx(float(norm), rel=1e-6)
    scale = 0.3 / (norm + 1e-6)
    for gradient in gradients:
        gradient.mul_(scale)


def clip_values(loop: Loop) -> None:
    clip_grad_value_(loop.model.parameters(), 0.01)


def clip_values_foreach(loop: Loop) -> None:
    clip_grad_value_(loop.model.parameters(), 0.01, foreach=True)


def clip_each(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        clip_grad_norm_(parameter, 0.05)


def clip_twice(loop: Loop) -> None:
    clip_grad_value_(loop.model.parameters(), 0.01)
    loop.history.append(float(clip_grad_norm_(loop.model.parameters(), 0.1)))
    loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)))


def ours_then_torchs(loop: Loop) -> None:
    loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)))
    loop.history.append(float(clip_grad_norm_(loop.model.parameters(), 0.3)))


def scale_layers(loop: Loop) -> None:
    for name, parameter in loop.named().items():
        if "layers.1" in name:
            parameter.grad.mul_(0.1)
        elif "layers.0" in name:
            parameter.grad = parameter.grad * 0.5
        else:
            parameter.grad.data /= 3


def freeze(loop: Loop) -> None:
    for name, parameter in loop.named().items():
        if "mlp" in name:
            parameter.grad = None


def shift(loop: Loop) -> None:
    for parameter in loop.named().values():
        parameter.grad.add_(torch.full_like(parameter, 0.003))


def centre(loop: Loop) -> None:
    for name, parameter in loop.named().items():
        if "norm" in name:
            parameter.grad.sub_(parameter.grad.mean())


def read(loop: Loop) -> None:
    """Norms of single parameters, in the ways they are written; those of the first stage, which is rank 0's."""
    for name, parameter in loop.named().items():
        norms = [
            parameter.grad.norm(),
            parameter.grad.data.norm(2).item(),
            parameter.grad.detach().float().norm(),
            torch.linalg.vector_norm(parameter.grad),
            parameter.grad.pow(2).sum().sqrt(),
            parameter.grad.abs().max(),
        ]
        assert torch.isfinite(parameter.grad).all(), name
        if "layers.0" in name or "embed" in name:
            loop.history.extend(float(norm) for norm in norms)


USES: dict[str, Callable[[Loop], None]] = {
    use.__name__: use
    for use in (
        clip,
        clip_foreach,
        clip_largest,
        clip_by_hand,
        clip_values,
        clip_values_foreach,
        clip_each,
        clip_twice,
        ours_then_torchs,
        scale_layers,
        freeze,
        shift,
        centre,
        read,
    )
}
LAYOUTS = {2: ["dp2", "zero1", "zero2", "pp2", "tp2", "zero1_offload"], 4: ["pp2_zero1", "tp2_zero1", "pp2_dp2"]}
SOME = ["clip", "clip_values", "freeze", "scale_layers", "read"]  # with 4 ranks
ROWS = {
    2: {layout: list(USES) for layout in LAYOUTS[2]}
    | {"zero3": ["clip", "clip_foreach", "clip_values", "clip_by_hand"]},
    4: dict.fromkeys(LAYOUTS[4], SOME),
}


def body(use: Callable[[Loop], None]) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            loop.backward(step)
            use(loop)
            loop.step()

    return run


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{layout}-{name}": user_loops.tried(layout, body(USES[name])) for name, layout in cases}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run = chosen(request, CASES)
    ones = [(name, "one") for name in dict.fromkeys(name for name, _ in run)]
    cases = {size: [case for case in run if case[1] in layouts] for size, layouts in ROWS.items()}
    for world_size, rows in ((1, ones), *cases.items()):
        folder = tmp_path_factory.mktemp("loops")
        options = {"init_group": world_size > 1, "env": ENV, "timeout": 200.0}
        found |= run_ranks(main, world_size, rows, tmp_path=folder, **options)[0]
    return found


CASES = [(name, layout) for rows in ROWS.values() for layout in rows for name in rows[layout]]


# Uses meet stages and shards in turns, and copies in place of parts.
TURNS = (("zero1", "zero2", "zero1_offload", "dp2"), ("pp2", "tp2"), FAMILIES[1])


@pytest.mark.parametrize(("name", "layout"), thinned(CASES, TURNS))
def test_what_user_code_does_to_gradients_is_in_effect(name: str, layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{layout}-{name}"], runs[f"one-{name}"]) < 1e-5
