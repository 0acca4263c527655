"""If these fail, every multi-rank test below lies: the harness itself loses failures or hangs."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import rank_runner
import torch
import torch.distributed as dist
from rank_runner import RankError, run_ranks


def all_reduce_rank(rank: int, world_size: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return float(value)


def frozen_objects(rank: int, world_size: int) -> int:
    return gc.get_freeze_count()


def raise_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def exit_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def hang_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_return_their_values_in_order(world_size: int, tmp_path: Path) -> None:
    total = world_size * (world_size + 1) / 2
    assert run_ranks(all_reduce_rank, world_size, tmp_path=tmp_path) == [total] * world_size


def test_a_raising_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1.*planted"):
        run_ranks(raise_on_rank_1, 2, tmp_path=tmp_path)


def test_a_dying_rank_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: exited with code 3"):
        run_ranks(exit_on_rank_1, 2, tmp_path=tmp_path)


def test_a_hanging_rank_is_named_with_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_runner, "PATIENCE", 1.0)
    with pytest.raises(RankError, match=r"(?s)rank 1 still running.*hang_on_rank_1"):
        run_ranks(hang_on_rank_1, 2, tmp_path=tmp_path, timeout=5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_collect_no_garbage_among_what_the_server_imported(world_size: int, tmp_path: Path) -> None:
    """A training ends with `gc.collect()`: among all of transformers it takes longer than the training of a tiny model."""
    counts = run_ranks(frozen_objects, world_size, tmp_path=tmp_path, init_group=world_size > 1)
    assert min(counts) > 100_000
