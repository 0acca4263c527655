"""Logits of a training step that a loop reads after `optimizer.step()`, as loops that count right tokens do: those of the step, or refused.

If a row fails, the accuracy that a loop logs is that of other weights than those that the batch was trained with.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import user_loops
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


def batch_of(loop: Loop, step: int) -> dict[str, torch.Tensor]:
    rows = tiny.collate(tiny.rows(64))
    mine = user_loops.ROWS // loop.replicas
    first = step * user_loops.ROWS + loop.replica * mine
    return {name: value[first : first + mine] for name, value in rows.items()}


def noted(loop: Loop, logits: torch.Tensor) -> None:
    total = logits.detach().double().square().mean()
    loop.history.append(float(loop.accelerator.reduce(total, "mean")))


def before_step(loop: Loop) -> None:
    for step in range(STEPS):
        output = loop.model(**batch_of(loop, step))
        loop.accelerator.backward(output.loss)
        noted(loop, output.logits)
        loop.step()


def after_step(loop: Loop) -> None:
    for step in range(STEPS):
        output = loop.model(**batch_of(loop, step))
        loop.accelerator.backward(output.loss)
        loop.step()
        noted(loop, output.logits)


def after_step_without_graph(loop: Loop) -> None:
    for step in range(STEPS):
        output = loop.model(**batch_of(loop, step))
        loop.accelerator.backward(output.loss)
        loop.step()
        with torch.no_grad():
            noted(loop, output["logits"])


def read_before_and_after(loop: Loop) -> None:
    """What was made before is still there."""
    for step in range(STEPS):
        output = loop.model(**batch_of(loop, step))
        noted(loop, output.logits)
        loop.accelerator.backward(output.loss)
        loop.step()
        noted(loop, output.logits)


USES = {use.__name__: use for use in (before_step, after_step, after_step_without_graph, read_before_and_after)}


def looping(use: Any) -> Any:
    def body(loop: Loop) -> None:
        loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.3, momentum=0.5))
        use(loop)

    return body


BODIES = {name: looping(use) for name, use in USES.items()}
CASES = [(name, layout) for name in USES for layout in ("pp2", "tp2", "zero3")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_of_a_step(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    late = layout == "pp2" and name.startswith("after_step")
    user_loops.check(runs, name, layout, "was read after optimizer.step() with pp_size=2" if late else "")
