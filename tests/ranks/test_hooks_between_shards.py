"""Hooks of users on modules of sharded layers: planned with or checked if they come before, refused if they come later and see parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import user_loops
from rank_runner import run_ranks
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
REFUSED, OF_LOGITS = "would see this rank's channels only", "would see this rank's part of the vocabulary only"
CHECKED = "the sharded model differs from the plain one"  # a layer that is not like the others of its kind


def normalised(module: Any, inputs: Any, output: Any) -> Any:
    return output / (1.0 + output.norm(dim=-1, keepdim=True))


def centred(module: Any, inputs: Any) -> Any:
    return (inputs[0] - inputs[0].mean(-1, keepdim=True), *inputs[1:])


def on_columns(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.up_proj.register_forward_hook(normalised)


def between(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.act_fn.register_forward_hook(normalised)


def before_columns(model: Any) -> None:
    for block in model.model.layers:
        for layer in (block.mlp.up_proj, block.mlp.gate_proj):
            layer.register_forward_pre_hook(centred)


def before_rows(model: Any) -> None:
    model.model.layers[-1].mlp.down_proj.register_forward_pre_hook(centred)


def other_forward(model: Any) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    inner = layer.forward
    layer.forward = lambda x: normalised(layer, x, inner(x))


def other_class(model: Any) -> None:
    layer = model.model.layers[0].mlp.act_fn
    kind = type(layer)
    layer.__class__ = type("Own", (kind,), {"forward": lambda self, x: normalised(self, x, kind.forward(self, x))})


def on_rows(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.down_proj.register_forward_hook(normalised)
        block.self_attn.o_proj.register_forward_hook(normalised)


def around(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.register_forward_hook(normalised)
        block.mlp.register_forward_pre_hook(centred)


def on_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(normalised)


def before_the_head(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(centred)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    change.__name__: (
        change,
        REFUSED if change in (on_columns, between, before_rows, other_forward, other_class) else "",
    )
    for change in (
        on_columns,
        between,
        before_rows,
        other_forward,
        other_class,
        before_columns,
        on_rows,
        around,
        before_the_head,
    )
}
CHANGES["on_the_head"] = (on_the_head, OF_LOGITS)


def early(change: Callable[[Any], None], loop: Loop) -> None:
    change(loop.model)
    loop.prepare()
    steps(loop)


def late(change: Callable[[Any], None], loop: Loop) -> None:
    loop.prepare()
    change(loop.model)
    steps(loop)


def steps(loop: Loop) -> None:
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


WHEN = {"early": early, "late": late}


def main(rank: int, world_size: int, layout: str) -> dict[str, Any]:
    def tried(when: str, name: str) -> Any:
        change = CHANGES[name][0]
        return user_loops.tried(layout, lambda loop: WHEN[when](change, loop), build=lambda: tiny.llama(layers=2))

    return {f"{when}-{name}": tried(when, name) for when in WHEN for name in CHANGES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("hooks")
    alone = run_ranks(main, 1, "one", tmp_path=folder, env=ENV, init_group=False, timeout=200.0)[0]
    return alone, run_ranks(main, 2, "tp2", tmp_path=folder, env=ENV, timeout=200.0)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_see_whole_tensors_or_are_refused(name: str, when: str, runs: Any) -> None:
    alone, ranks = runs
    refused = CHANGES[name][1] if when == "late" else CHECKED if name == "before_rows" else ""
    for found in ranks if refused else ranks[:1]:
        mine = found[f"{when}-{name}"]
        if refused:
            assert refused in str(mine)
            continue
        assert user_loops.difference(mine, alone[f"{when}-{name}"]) < 1e-5


def patched(model: Any) -> None:
    """The forward of all modules of a class is another one."""
    kind = type(model.model.layers[0].mlp)
    inner = kind.forward
    kind.forward = lambda self, x: normalised(self, x, inner(self, x))


def of_tokens(rank: int, world_size: int, layout: str) -> dict[str, Any]:
    kind = type(tiny.llama(layers=2).model.layers[0].mlp)

    def tried(when: str, change: Callable[[Any], None]) -> Any:
        whole = kind.forward
        try:
            return user_loops.tried(layout, lambda loop: WHEN[when](change, loop), build=lambda: tiny.llama(layers=2))
        finally:
            kind.forward = whole

    return {when: tried(when, around) for when in WHEN} | {"patched": tried("late", patched)}


def test_hooks_that_would_see_part_of_the_tokens_are_refused(runs: Any, tmp_path: Path) -> None:
    ranks = run_ranks(of_tokens, 2, "sp2", tmp_path=tmp_path, env=ENV)
    for found in ranks:
        assert "was put on model.layers.0.mlp after the model was prepared, with sp_size above 1" in found["late"]
        assert "this rank's part of the tokens only" in found["late"]
        assert "whole: the model itself." in found["late"]
        assert "forward of model.layers.0.mlp was replaced after the model was prepared" in found["patched"]
    assert user_loops.difference(ranks[0]["early"], runs[0]["early-around"]) < 1e-5
