"""A wrapper around the model that hands attributes on to it, as Lightning Fabric's does: ours stay with what was prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from torch import nn
from trainer_cases import ENV


pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pp_size": 2, "num_microbatches": 2}, "tp2": {"tp_size": 2}}


class Handing(nn.Module):
    """Sets on the model what both have, and finds there what it has not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.is_ready = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in vars(self) or not vars(self).get("is_ready", False) or not hasattr(self.inner, name)
        super().__setattr__(name, value) if mine else setattr(self.inner, name, value)


def losses_main(rank: int, world_size: int, parallel: dict[str, Any] | None) -> list[float]:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    plugin = {} if parallel is None else {"parallelism_config": HFParallelPlugin({}, **parallel)}
    accelerator = Accelerator(cpu=True, **plugin)
    model = Handing(tiny.llama(layers=2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))
    found = []
    for start in (0, 4, 8):
        loss = model(**tiny.collate(tiny.rows(12, True)[start : start + 4])).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    if parallel is not None:
        accelerator.hf_parallel.watchdog.stop()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrapper_that_hands_attributes_on_trains(layout: str, tmp_path: Path) -> None:
    [expected] = run_ranks(losses_main, 1, None, tmp_path=tmp_path, init_group=False, env=ENV)
    for found in run_ranks(losses_main, 2, LAYOUTS[layout], tmp_path=tmp_path, timeout=60, env=ENV):
        assert found == pytest.approx(expected, rel=1e-5)
