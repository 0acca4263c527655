"""A loop of users that moves or casts its prepared model: where nothing changes it trains on, parts of ZeRO 3 are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from user_loops import Loop


pytestmark = [pytest.mark.timeout(200), pytest.mark.long]


def after_each_step(move: Callable[[Any], object]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for index in range(user_loops.STEPS):
            loop.backward(index)
            loop.step()
            move(loop.model)

    return body


BODIES = {
    "stays": after_each_step(lambda model: model.to("cpu").float().cpu()),
    "cast": after_each_step(lambda model: model.to(torch.bfloat16)),
}
CASES = [("stays", layout) for layout in ("zero3", "zero1", "tp2", "pp2")] + [("cast", "zero3")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), ["stays"], CASES, tmp_path_factory.mktemp("moved"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_prepared_model_is_moved_to_where_it_is_and_nowhere_else(
    name: str, layout: str, found: list[dict[str, Any]]
) -> None:
    said = "Move or cast the model before it is prepared"
    user_loops.check(found, name, layout, said if name == "cast" else "")
