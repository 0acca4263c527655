"""Flat buffers are gathered and summed by messages where gloo's own collectives copy too much; values and calls."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks

from hf_parallel.compat.private_collectives import (
    WORTH_HALVES,
    WORTH_MESSAGES,
    all_gather_flat,
    all_gather_new,
    all_reduce_flat,
    reduce_scatter_flat,
)


LARGE = WORTH_MESSAGES // 2  # elements, of 2 bytes and more


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gathering_rank(rank: int, world_size: int) -> dict[str, int]:
    calls: Counter[str] = Counter()
    batch: Any = dist.batch_isend_irecv

    def counted(operations: Any) -> Any:
        calls["messages"] += 1
        return batch(operations)

    dist.batch_isend_irecv = counted
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for numel in (3, LARGE, 4 * LARGE):
            wanted = torch.cat([values(other, numel, dtype) for other in range(world_size)])
            in_place, apart = torch.empty_like(wanted), torch.empty_like(wanted)
            mine = in_place.view(world_size, -1)[rank]
            mine.copy_(values(rank, numel, dtype))
            # Several are under way at once, and the first is not the first to be waited for.
            works = [all_gather_flat(whole, mine, dist.group.WORLD) for whole in (in_place, apart)]  # type: ignore[arg-type]
            for work in reversed(works):
                assert work is not None
                work.wait()
            assert torch.equal(in_place, wanted)
            assert torch.equal(apart, wanted)
    dist.batch_isend_irecv = batch
    return dict(calls)


def stacking_rank(rank: int, world_size: int) -> None:
    lists = mock.Mock(side_effect=AssertionError("NCCL copies what it gathers into a list once more"))
    with mock.patch.object(dist, "all_gather", lists):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            for shape in ((), (3, 2), (4, LARGE)):
                rows = [
                    values(other, math.prod(shape), torch.float32).mul(9).view(shape).to(dtype)
                    for other in range(world_size)
                ]
                assert torch.equal(all_gather_new(rows[rank], dist.group.WORLD), torch.stack(rows))  # type: ignore[arg-type]
        across = all_gather_new(rows[rank].mT, dist.group.WORLD)  # type: ignore[arg-type]
        assert torch.equal(across, torch.stack([row.mT for row in rows]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_gather_tensors_of_any_shape_into_one_buffer(world_size: int, tmp_path: Path) -> None:
    run_ranks(stacking_rank, world_size, tmp_path=tmp_path)


@pytest.mark.parametrize(("world_size", "calls"), [(2, {"messages": 2 * (2 + 2 + 1)}), (3, {})])
def test_two_ranks_gather_large_buffers_by_messages(world_size: int, calls: dict[str, int], tmp_path: Path) -> None:
    assert run_ranks(gathering_rank, world_size, tmp_path=tmp_path) == [calls] * world_size


def reducing_rank(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 1000, WORTH_HALVES // dtype.itemsize, WORTH_HALVES):
            sums = [values(rank + 10 * number, numel, dtype) for number in range(3)]
            works = [all_reduce_flat(one, dist.group.WORLD) for one in sums]  # type: ignore[arg-type]
            for number in reversed(range(3)):
                work = works[number]
                assert work is not None
                work.wait()
                wanted = sum(values(other + 10 * number, numel, dtype) for other in range(world_size))
                assert torch.equal(sums[number], wanted)  # type: ignore[arg-type]  # the same bits on both


def test_small_sums_are_the_same_on_both_ranks(tmp_path: Path) -> None:
    run_ranks(reducing_rank, 2, tmp_path=tmp_path)


def summing_rank(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sent = [values(rank + 10 * number, 5 * world_size, dtype) for number in range(3)]
        kept = [one.clone() for one in sent]
        mine = [torch.empty(5, dtype=dtype) for _ in sent]
        works = [reduce_scatter_flat(own, whole, dist.group.WORLD) for own, whole in zip(mine, sent, strict=True)]  # type: ignore[arg-type]
        for work in reversed(works):
            assert work is not None
            work.wait()
        for number, (own, whole, before) in enumerate(zip(mine, sent, kept, strict=True)):
            parts = [
                values(other + 10 * number, 5 * world_size, dtype).view(world_size, -1) for other in range(world_size)
            ]
            # In the order of the ranks, whose sum of half-precision numbers is rounded once.
            assert torch.equal(own, torch.stack([part[rank] for part in parts]).sum(0))
            assert torch.equal(whole, before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_are_summed_where_they_belong(world_size: int, tmp_path: Path) -> None:
    run_ranks(summing_rank, world_size, tmp_path=tmp_path)


def dropping_rank(rank: int, world_size: int) -> None:
    world: Any = dist.group.WORLD
    for numel in (10, LARGE):
        for begin in (
            lambda x: all_reduce_flat(x, world),
            lambda x: reduce_scatter_flat(torch.empty(x.numel() // 2), x, world),
            lambda x: all_gather_flat(torch.empty(2 * x.numel()), x, world),
        ):
            begin(torch.ones(numel))  # an exception ends the step before anybody waits
            time.sleep(0.2 * rank)
            total = torch.ones(numel)
            dist.all_reduce(total)
            assert torch.equal(total, torch.full_like(total, 2.0))
            work = all_reduce_flat(total, world)
            assert work is not None
            work.wait()
            assert torch.equal(total, torch.full_like(total, 4.0))


def test_what_nobody_waits_for_holds_up_nobody(tmp_path: Path) -> None:
    run_ranks(dropping_rank, 2, tmp_path=tmp_path, timeout=60)
