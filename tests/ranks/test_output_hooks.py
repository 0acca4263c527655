"""Hooks of users on what the model returns: they change its gradients as in one process, or are refused.

If a row fails, a loss that limits the gradient of hidden states, or goes on from a cache, trains without a word as if it did not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import user_loops
from torch import Tensor
from user_loops import ROWS, STEPS, Loop


user_loops.LAYOUTS["tp2_shared_sequence"] = {"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}}
LAYOUTS = ("sp2", "tp2", "tp2_shared_sequence", "pp2")


def half(gradient: Tensor) -> Tensor:
    return gradient / 2


def hooked_states(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    output = loop.model(**batch, output_hidden_states=True)
    output.hidden_states[1].register_hook(half)
    return output.loss  # type: ignore[no-any-return]


def kept_states(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    output = loop.model(**batch, output_hidden_states=True)
    output.hidden_states[-1].retain_grad()
    return output.loss  # type: ignore[no-any-return]


def hooked_logits(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    output = loop.model(**batch)
    output.logits.register_hook(half)
    return output.loss  # type: ignore[no-any-return]


def states_in_the_loss(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    output = loop.model(**batch, output_hidden_states=True)
    return output.loss + 0.1 * output.hidden_states[1].pow(2).mean()  # type: ignore[no-any-return]


def segments(loop: Loop, batch: dict[str, Tensor], **options: Any) -> Tensor:
    ids, half = batch["input_ids"], batch["input_ids"].shape[1] // 2
    first = loop.model(input_ids=ids[:, :half], **options)
    second = loop.model(
        input_ids=ids[:, half:],
        attention_mask=ids.new_ones(ids.shape),
        past_key_values=getattr(first, "past_key_values", None),
        **options,
    )
    return first.logits.pow(2).mean() + second.logits.pow(2).mean()  # type: ignore[no-any-return]


BODIES: dict[str, Callable[[Loop, dict[str, Tensor]], Tensor]] = {
    body.__name__: body for body in (hooked_states, kept_states, hooked_logits, states_in_the_loss)
}
BODIES |= {"segments": segments, "segments_with_cache": functools.partial(segments, use_cache=True)}

REFUSED = {
    ("sp2", "hooked_states"): "register_hook on outputs.hidden_states with sp_size=2",
    ("sp2", "kept_states"): "retain_grad on outputs.hidden_states with sp_size=2",
    ("sp2", "hooked_logits"): "register_hook on outputs.logits with sp_size=2",
    ("sp2", "segments"): "attention_mask of ",
    ("sp2", "segments_with_cache"): "use_cache=True in a training forward with sp_size=2",
    ("pp2", "hooked_states"): "output_hidden_states with pp_size=2",
    ("pp2", "kept_states"): "output_hidden_states with pp_size=2",
    ("pp2", "states_in_the_loss"): "output_hidden_states with pp_size=2",
    ("pp2", "hooked_logits"): "register_hook on outputs.logits with pp_size=2",
    ("tp2", "hooked_logits"): "register_hook on outputs.logits with tp_size=2",
    ("tp2_shared_sequence", "hooked_logits"): "register_hook on outputs.logits with tp_size=2",
}


# Stages keep no cache: a mask that is longer than the tokens ends in an error of torch on the first of them.
CASES = [(name, layout) for name in BODIES for layout in LAYOUTS if layout != "pp2" or "segments" not in name]


def training(loop: Loop, body: Callable[[Loop, dict[str, Tensor]], Tensor]) -> None:
    loop.prepare()
    loop.model.train()
    rows = tiny.collate(tiny.rows(64))
    for step in range(STEPS):
        batch = {name: value[step * ROWS : step * ROWS + ROWS] for name, value in rows.items()}
        loss = body(loop, batch)
        loop.history.append(float(loss.detach()))
        loop.accelerator.backward(loss)
        loop.step()


def main(rank: int, world_size: int, layouts: tuple[str, ...]) -> dict[str, Any]:
    return {
        f"{name}-{layout}": user_loops.tried(layout, functools.partial(training, body=body))
        for layout in layouts
        for name, body in BODIES.items()
        if (name, layout) in CASES or layout == "one"
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return user_loops.alone_and_together(main, LAYOUTS, tmp_path_factory.mktemp("outputs"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_hook_on_an_output_changes_the_gradients_or_is_refused(name: str, layout: str, runs: Any) -> None:
    ranks, alone = runs
    refusal = REFUSED.get((layout, name))
    for found in ranks:
        mine = found[f"{name}-{layout}"]
        if refusal is not None:
            assert isinstance(mine, str), "it trained"
            assert refusal in mine
    if refusal is None:
        assert user_loops.difference(ranks[0][f"{name}-{layout}"], alone[f"{name}-one"]) < 1e-5
