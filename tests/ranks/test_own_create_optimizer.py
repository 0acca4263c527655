"""A Trainer's own `create_optimizer` groups parameters by their sizes: those of whole ones, where a rank has shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import user_steps
from transformers import Trainer


pytestmark = pytest.mark.long


class RatesByWidth(Trainer):
    """As in muP."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        rates = [(p, 0.1 / p.shape[-1] if p.ndim > 1 else 1e-2) for p in self.model.parameters()]  # type: ignore[union-attr]
        self.optimizer = torch.optim.AdamW([{"params": [p], "lr": rate} for p, rate in rates], eps=1e-5)
        return self.optimizer


class MadeOfSelf(Trainer):
    """An override as most are written: stock passes no model."""

    def create_optimizer(self) -> Any:  # type: ignore[override]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-5)  # type: ignore[union-attr]
        return self.optimizer


user_steps.KINDS["RatesByWidth"] = (RatesByWidth, {})
user_steps.KINDS["MadeOfSelf"] = (MadeOfSelf, {})


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.mark.parametrize("kind", ["RatesByWidth", "MadeOfSelf"])
def test_optimizers_are_made_as_by_one_process(kind: str, tmp_path: Path) -> None:
    found = []
    for world_size, parallel in ((1, None), (2, {"tp_size": 2})):
        found.append(user_steps.launch([(kind, parallel, {})], world_size, tmp_path / str(world_size), many)[0][0])
    user_steps.same(found[1], found[0])
