"""What user code attaches to parameters (hooks, attributes) is in effect on every layout, before and after `prepare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import RankError, run_ranks
from thinning import FAMILIES, chosen, thinned
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


def new_rows(rows: int) -> torch.Tensor:
    """The mask of "train only the new tokens"."""
    mask = torch.zeros(rows, 1)
    mask[-7:] = 1.0
    return mask


def train(loop: Loop, after: Callable[[int], None] = lambda step: None) -> None:
    for step in range(STEPS):
        loop.backward(step)
        loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)))
        loop.step()
        after(step)


def mask_before(loop: Loop) -> None:
    embedding = loop.model.get_input_embeddings().weight
    mask = new_rows(len(embedding))
    embedding.register_hook(lambda gradient: gradient * mask)
    loop.model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 0.5 * gradient)
    loop.prepare()
    train(loop)


def mask_after(loop: Loop) -> None:
    loop.prepare()
    mask = new_rows(tiny.VOCAB)
    for name, parameter in loop.named().items():
        if name == "model.embed_tokens.weight":
            parameter.register_hook(lambda gradient: gradient * mask)
    train(loop)


def mask_in_place(loop: Loop) -> None:
    loop.prepare()

    def forget(gradient: torch.Tensor) -> None:
        gradient[:-7] = 0.0

    for name, parameter in loop.named().items():
        if name == "model.embed_tokens.weight":
            parameter.register_hook(forget)
    train(loop)


def removed(loop: Loop) -> None:
    handles = [loop.model.get_input_embeddings().weight.register_hook(lambda gradient: 0.0 * gradient)]
    loop.prepare()
    train(loop, lambda step: handles.pop().remove() if step == 1 else None)


def on_accumulated(loop: Loop) -> None:
    def forget(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[:-7] = 0.0

    loop.model.get_input_embeddings().weight.register_post_accumulate_grad_hook(forget)
    loop.prepare()
    train(loop)


def on_accumulated_after(loop: Loop) -> None:
    """Registered after ours; the first steps find out which buckets may leave early."""
    loop.prepare()
    train(loop)

    def forget(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[:-7] = 0.0

    for name, parameter in loop.named().items():
        if name == "model.embed_tokens.weight":
            parameter.register_post_accumulate_grad_hook(forget)
    train(loop)


def attributes(loop: Loop) -> None:
    """An optimizer whose groups are made from what parameters say about themselves."""
    for name, parameter in loop.model.named_parameters():
        if "norm" in name:
            parameter.lr_scale = 10.0
    model = loop.accelerator.prepare(loop.model)
    scales = [(p, getattr(p, "lr_scale", 1.0)) for p in model.parameters()]
    groups = [{"params": [p for p, s in scales if s == one], "lr": 1e-2 * one} for one in (1.0, 10.0)]
    loop.prepare(torch.optim.SGD([group for group in groups if group["params"]]))
    train(loop)


def evaluation_before_clipping(loop: Loop) -> None:
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        with torch.no_grad():
            loop.loss(9)
        parameters = list(loop.model.parameters())
        loop.history.append(float(loop.accelerator.clip_grad_norm_(parameters, 0.5)))
        loop.step()


BODIES: dict[str, Callable[[Loop], None]] = {
    body.__name__: body
    for body in (
        mask_before,
        mask_after,
        mask_in_place,
        removed,
        on_accumulated,
        on_accumulated_after,
        attributes,
        evaluation_before_clipping,
    )
}
FEW = [name for name in BODIES if not name.startswith("on_accumulated")]
ROWS = {
    2: {
        "dp2": list(BODIES),
        "zero1": list(BODIES),
        "zero2": list(BODIES),
        "pp2": [*FEW, "on_accumulated"],
        "tp2": FEW,
        "zero3": [*FEW, "on_accumulated"],
    },
    4: {"tp2_zero3": ["mask_before", "mask_after", "attributes"], "pp2_dp2": ["mask_before"]},
}


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{layout}-{name}": user_loops.tried(layout, BODIES[name]) for name, layout in cases}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run = chosen(request, CASES)
    cases = {size: [case for case in run if case[1] in layouts] for size, layouts in ROWS.items()}
    for world_size, rows in ((1, [(name, "one") for name in BODIES]), *cases.items()):
        folder = tmp_path_factory.mktemp("loops")
        options = {"init_group": world_size > 1, "env": ENV, "timeout": 200.0}
        found |= run_ranks(main, world_size, rows, tmp_path=folder, **options)[0]
    return found


CASES = [(name, layout) for rows in ROWS.values() for layout in rows for name in rows[layout]]


# Layouts that are no parts of an optimizer's states take turns too.
@pytest.mark.parametrize(("name", "layout"), thinned(CASES, (*FAMILIES, ("dp2", "pp2"), ("tp2", "zero3"))))
def test_what_is_attached_to_parameters_is_in_effect(name: str, layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{layout}-{name}"], runs[f"one-{name}"]) < 1e-5


def accumulated_shards(rank: int, world_size: int) -> None:
    on_accumulated(Loop("tp2"))


def test_a_hook_on_an_accumulated_shard_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"UnsupportedError: parameter model.embed_tokens.weight has a hook .*tp_size=2"
    ):
        run_ranks(accumulated_shards, 2, tmp_path=tmp_path, env=ENV)


def clipped_parts(rank: int, world_size: int) -> None:
    loop = Loop("tp2_zero3")
    loop.prepare()
    loop.backward(0)
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
    loop.step()


def test_parts_of_shards_that_torch_clipped_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"UnsupportedError: gradients were changed .*clip_grad_norm_.*tp_size=2"):
        run_ranks(clipped_parts, 4, tmp_path=tmp_path, env=ENV)
