"""The loss scaler of several ranks takes the optimizers that a loss scaler of one process takes.

If a test fails here, fp16 training dies at its first optimizer step on a GPU, where AdamW is fused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks

from hf_parallel.compat.private_optimizers import scaler_of_group


def steps(rank: int, world_size: int, fused: bool) -> tuple[list[float], float]:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, fused=fused)
    scaler = scaler_of_group(torch.amp.GradScaler("cpu", init_scale=8.0), "cpu", dist.group.WORLD)
    assert scaler_of_group(scaler, "cpu", dist.group.WORLD) is scaler
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(linear(torch.ones(1, 4)).sum()).backward()
        if step == 1 and rank == 1:
            linear.bias.grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(float(linear.weight.detach().double().sum()))
    return seen, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_skipped_by_all_ranks_or_by_none(fused: bool, tmp_path: Path) -> None:
    here, there = run_ranks(steps, 2, fused, tmp_path=tmp_path)
    assert here == there
    (first, second, third), scale = here
    assert first == second != third
    assert scale == 4.0
