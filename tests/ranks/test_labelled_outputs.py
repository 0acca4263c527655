"""The outputs of a call with labels as a mapping and as a tuple: with tp and a shared sequence those of one process.

If a row fails, a loop that walks over the outputs (`outputs.items()`, `dict(outputs)`, a copy, a pickle) sees no logits.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_loops
from torch.utils import _pytree
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


LAYOUTS = ("tp2", "sp2", "zero3")


def by_attribute(outputs: Any) -> dict[str, torch.Tensor]:
    return {"loss": outputs.loss, "logits": outputs.logits}


def items(outputs: Any) -> dict[str, torch.Tensor]:
    return dict(outputs.items())


def keys(outputs: Any) -> dict[str, torch.Tensor]:
    found = outputs.keys()
    return {name: outputs[name] for name in found}


def names(outputs: Any) -> dict[str, torch.Tensor]:
    assert "logits" in outputs
    assert len(outputs) == len(list(outputs)) == len(outputs.keys())
    return {name: outputs[name] for name in outputs}


def as_dict(outputs: Any) -> dict[str, torch.Tensor]:
    return dict(outputs)


def spread(outputs: Any) -> dict[str, torch.Tensor]:
    return {**outputs}


def values(outputs: Any) -> dict[str, torch.Tensor]:
    return dict(zip(outputs.keys(), outputs.values(), strict=True))


def as_tuple(outputs: Any) -> dict[str, torch.Tensor]:
    found = outputs.to_tuple()
    return dict(zip(outputs.keys(), found, strict=True))


def slices(outputs: Any) -> dict[str, torch.Tensor]:
    assert len(outputs[:1]) == 1
    return dict(zip(outputs.keys(), (outputs[0], *outputs[1:]), strict=True))


def from_behind(outputs: Any) -> dict[str, torch.Tensor]:
    return {"loss": outputs[0], "logits": outputs[-1 if len(outputs) == 2 else -2]}  # a cache may come last


def copied(outputs: Any) -> dict[str, torch.Tensor]:
    made = copy.copy(outputs)
    assert type(made).__name__ == "CausalLMOutputWithPast"
    return dict(made)


def pickled(outputs: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        made = pickle.loads(pickle.dumps(outputs))
    assert type(made).__name__ == "CausalLMOutputWithPast"
    return dict(made)


def mapped(outputs: Any) -> dict[str, torch.Tensor]:
    return dict(_pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs))


def scaled_in_place(outputs: Any) -> dict[str, torch.Tensor]:
    """As a wrapper that puts a temperature into the logits."""
    outputs.logits = outputs.logits / 2
    outputs["loss"] = outputs["loss"] * 3
    assert torch.equal(outputs.logits, outputs["logits"])
    return dict(outputs)


VIEWS = (
    by_attribute,
    items,
    keys,
    names,
    as_dict,
    spread,
    values,
    as_tuple,
    slices,
    from_behind,
    copied,
    pickled,
    mapped,
    scaled_in_place,
)


def looping(view: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Loop], None]:
    """A loop that notes the mean square of each tensor, and trains with one of the logits beside the loss."""

    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.3, momentum=0.5))
        for step in range(STEPS):
            outputs = loop.outputs(step)
            loss = outputs.loss
            found = view(outputs)
            tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
            assert {"loss", "logits"} <= set(tensors)
            for name in sorted(tensors):
                value = tensors[name].detach().double()
                total = (
                    value if name == "loss" else value.square()
                ).mean()  # of the batch, where replicas have parts of it
                loop.history.append(float(loop.accelerator.reduce(total, "mean")))
            loop.accelerator.backward(loss)
            loop.step()

    return body


BODIES = {view.__name__: looping(view) for view in VIEWS}
CASES_OF_FOUR = [("items", "tp2_zero3"), ("copied", "tp2_zero3")]  # `fully_shard` looks through the outputs, too
CASES = [
    (name, layout) for layout in LAYOUTS for name in BODIES if layout in ("tp2", "sp2") or name in ("items", "copied")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_outputs_with_labels_have_logits(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, "")


def test_outputs_with_labels_have_logits_where_shards_are_shared_out(tmp_path: Path) -> None:
    names = [name for name, _ in CASES_OF_FOUR]
    found = user_loops.launched(user_loops.main_of(__name__), names, CASES_OF_FOUR, tmp_path, world_size=4)
    for name, layout in CASES_OF_FOUR:
        user_loops.check(found, name, layout, "")
