"""Selective recomputation of a block that sums the result of a matrix product over ranks in its own memory.

A failure means that the second run sums the sum: a collective changes a tensor without raising its version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import Tensor, nn

from hf_parallel.activation_checkpointing.recompute import recompute_blocks


pytestmark = pytest.mark.long


class Sum(torch.autograd.Function):
    """The sum over the ranks in place; its gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(Sum.apply(self.first(x)).sin()).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def sum_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 8) + rank
    found = []
    for on in (False, True):
        if on:
            recompute_blocks(model, "blocks", [range(1), range(1, 2)], products=1, offload=True)
        model.zero_grad()
        model(x).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, mine in zip(*found, strict=True):
        assert torch.equal(expected, mine)


def test_a_sum_over_ranks_is_not_summed_again(tmp_path: Path) -> None:
    run_ranks(sum_rank, 2, tmp_path=tmp_path)
