"""Models with a value head, which return a tuple without a loss: trained as by one process, or refused by name before training."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import user_loops
from torch import nn
from torch.nn import functional as F
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


class Wrapped(nn.Module):
    """A model inside of a module with a value head, as TRL has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model, self.config = model, model.config
        self.v_head = nn.Linear(model.config.hidden_size, 1)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **rest: Any) -> Any:
        made = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, **rest
        )
        return made.logits, made.loss, self.v_head(made.hidden_states[-1]).squeeze(-1)


class Derived(tiny.LlamaForCausalLM):
    """A model with a value head of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.v_head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **rest: Any) -> Any:
        made = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True, **rest
        )
        return made.logits, made.loss, self.v_head(made.hidden_states[-1]).squeeze(-1)


BUILDS = {"wrapped": lambda: Wrapped(tiny.llama(layers=2)), "derived": lambda: Derived(tiny.llama(layers=2).config)}


def train(loop: Loop) -> None:
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1))
    for step in range(STEPS):
        rows = tiny.collate(tiny.rows(16)[step:][: user_loops.ROWS])
        logits, _, values = loop.model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
        likelihood = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten())
        loss = likelihood + values.square().mean()
        loop.history.append(float(loss.detach()))
        loop.accelerator.backward(loss)
        loop.step()


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{name}-{layout}": user_loops.tried(layout, train, build=BUILDS[name]) for name, layout in cases}


REFUSED = {
    "pp2": "pp_size above 1 with a forward that returns tuple of Tensor,",
    "sp2": "sp_size above 1 with a forward that returns tuple of Tensor,",
}
CASES = [(name, layout) for name in BUILDS for layout in ("pp2", "sp2", "tp2", "zero1", "zero3")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(main, BUILDS, CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_models_with_a_value_head(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, REFUSED.get(layout, ""))
