"""Masks that are longer or shorter than the tokens of a call: refused on stages on every rank, where one rank failed and the rest waited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import user_loops
from torch import Tensor
from torch.nn import functional as F
from user_loops import Loop


pytestmark = pytest.mark.long


def looping(change: Callable[[Tensor], Tensor]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1))
        for _ in range(2):
            rows = tiny.collate(tiny.rows(user_loops.ROWS))
            loss = loop.model(**{**rows, "attention_mask": change(rows["attention_mask"])}).loss
            loop.history.append(float(loss.detach()))
            loop.accelerator.backward(loss)
            loop.step()

    return body


BODIES = {
    "longer": looping(lambda mask: F.pad(mask, (0, 5), value=1)),
    "shorter": looping(lambda mask: mask[:, :-2]),
    "as_long": looping(lambda mask: mask),
}
CASES = [(name, layout) for name in BODIES for layout in ("pp2", "tp2")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_masks_of_other_lengths(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    refused = layout == "pp2" and name != "as_long"
    user_loops.check(
        runs, name, layout, "tokens for input_ids of 16 in a training forward with pp_size=2" if refused else ""
    )
