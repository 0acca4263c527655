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


user_steps.KINDS["RatesByWidth"] = (RatesByWidth, {})


def many(rank: int, world_size: int, jobs: list[Any], folder: str) -> Any:
    return user_steps.many(rank, world_size, jobs, folder)


def test_sizes_are_those_of_whole_parameters(tmp_path: Path) -> None:
    found = []
    for world_size, parallel in ((1, None), (2, {"tp_size": 2})):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        options: dict[str, Any] = {"init_group": world_size > 1, "env": user_steps.ENV, "tmp_path": folder}
        job = ("RatesByWidth", parallel, {})
        found.append(user_steps.run_ranks(many, world_size, [job], str(folder), **options)[0][0])
    user_steps.same(found[1], found[0])
