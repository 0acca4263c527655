"""If these fail, data-parallel replicas drift apart, or a parameter without a gradient is decayed on some ranks."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import Tensor, nn

from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic
from hf_parallel.errors import ConfigError, UnsupportedError


SHAPES = [(3, 4), (5,), (), (2, 3, 2), (7, 1), (1,), (6, 6), (0, 3)]


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(SHAPES)]


def gradient(rank: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(SHAPES[index], generator=generator).to(dtype)


def has_gradient(rank: int, index: int) -> bool:
    """p1 has a gradient on rank 0 only, p4 on the last odd rank only, p6 nowhere."""
    return {1: rank == 0, 4: rank == 1, 6: False}.get(index, True)


def assert_averaged(named: list[tuple[str, nn.Parameter]], world_size: int, scale: float, factor: float) -> None:
    for index, (name, param) in enumerate(named):
        dtype = param.dtype
        wide = torch.promote_types(dtype, torch.float32)
        parts = [gradient(r, index, dtype).mul(scale).to(wide) for r in range(world_size) if has_gradient(r, index)]
        if not parts:
            assert param.grad is None, name
            continue
        assert param.grad.dtype == dtype
        expected = torch.stack(parts).sum(0).mul(factor).to(dtype)
        # bf16: the sum is made in fp32, so only the final rounding may differ, by one unit in the last place
        tolerance = {"rtol": 8e-3, "atol": 0.0} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(param.grad, expected, msg=name, **tolerance)


def reducer_rank(rank: int, world_size: int) -> None:
    factor = 0.5 / world_size
    for dtype, bucket_bytes in itertools.product((torch.float32, torch.bfloat16, torch.float64), (1, 100, 25 * 2**20)):
        named = parameters(dtype)
        frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        reducer = GradientReducer(
            [*named, ("frozen", frozen), ("tied", named[0][1])], dist.group.WORLD, Traffic(bucket_bytes)
        )
        optimizer = torch.optim.SGD([param for _, param in named])
        for step, set_to_none in enumerate((True, False, False, True, True), start=1):
            for index, (_, param) in enumerate(named):
                if has_gradient(rank, index):
                    (param * gradient(rank, index, dtype) * step).sum().backward()
            reducer.reduce(factor)
            assert_averaged(named, world_size, step, factor)
            assert frozen.grad is None
            assert reducer.counters.collectives == len(reducer._buckets) * step
            optimizer.zero_grad(set_to_none=set_to_none)
        expected_buckets = {1: 7, 100: 3 if dtype == torch.float64 else 2, 25 * 2**20: 1}  # p7 has no elements
        assert len(reducer._buckets) == expected_buckets[bucket_bytes], (dtype, bucket_bytes, len(reducer._buckets))


@pytest.mark.parametrize("world_size", [2, 4])
def test_reduced_gradients_equal_plain_averaging_with_one_collective_a_bucket(world_size: int, tmp_path: Path) -> None:
    run_ranks(reducer_rank, world_size, tmp_path=tmp_path)


def announced_rank(rank: int, world_size: int) -> None:
    for announced in (0.5, 0.0, None):
        named = parameters()
        reducer = GradientReducer(named, dist.group.WORLD, Traffic(100, overlaps=True))
        for step in (1, 2, 3):
            reducer.arm(announced)
            for index, (_, param) in enumerate(named):
                if has_gradient(rank, index):
                    (param * gradient(rank, index) * step).sum().backward()
            reducer.reduce(0.25)
            assert_averaged(named, world_size, step, 0.25)
            for _, param in named:
                param.grad = None


def test_exact_sums_take_the_factor_of_the_reduction_whatever_was_announced(tmp_path: Path) -> None:
    run_ranks(announced_rank, 2, tmp_path=tmp_path)


def bf16_sum_rank(rank: int, world_size: int) -> float:
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    # 259, which rounds to 260; summed in bf16 it is 256 or 258, in whatever order
    param.grad = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    reducer = GradientReducer([("a", param), ("b", other)], dist.group.WORLD)
    assert len(reducer._buckets) == 1
    reducer.reduce(1.0)
    return float(param.grad)


def test_low_precision_gradients_are_summed_in_fp32(tmp_path: Path) -> None:
    assert run_ranks(bf16_sum_rank, 4, tmp_path=tmp_path) == [260.0] * 4


def buffers_rank(rank: int, world_size: int) -> list[bool]:
    """Whether gradients of a step have the memory of those of the step before: usually, when user code keeps some, when passes add up."""
    named = parameters()
    reducer = GradientReducer(named, dist.group.WORLD, Traffic(overlaps=True))
    pointers, old = [], None
    for step in range(1, 8):
        for armed in (False, True) if step == 6 else (True,):
            if armed:
                reducer.arm(0.5)
            for index, (_, param) in enumerate(named):
                if has_gradient(rank, index):
                    (param * gradient(rank, index) * step).sum().backward()
            if not armed:
                assert not reducer._pool._held
        reducer.reduce(0.5)
        assert_averaged(named, world_size, step * (2 if step == 6 else 1), 0.5)
        first = named[0][1].grad
        assert first is not None
        pointers.append(first.data_ptr())
        if step == 3:
            old = named[3][1].grad
        if step == 5:
            assert old is not None
            torch.testing.assert_close(old, sum(gradient(r, 3) * 3 * 0.5 for r in range(world_size)))
        for _, param in named:
            param.grad = None
        del first
        time.sleep(0.05)  # a thread of gloo lets go of a buffer a moment after its collective
    return [one == other for one, other in itertools.pairwise(pointers)][:4]


def test_gradients_keep_their_memory_unless_user_code_keeps_them_or_passes_add_up(tmp_path: Path) -> None:
    assert run_ranks(buffers_rank, 2, tmp_path=tmp_path) == [[True, True, False, True]] * 2


def test_without_a_group_the_factor_alone_is_applied() -> None:
    named = parameters()
    for index, (_, param) in enumerate(named[:3]):
        param.grad = gradient(0, index)
    GradientReducer(named, None).reduce(3.0)
    for index, (_, param) in enumerate(named):
        assert torch.equal(param.grad, gradient(0, index) * 3.0) if index < 3 else param.grad is None


def test_a_sparse_gradient_is_refused_by_name() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"gradient of table\.weight has layout torch\.sparse_coo"):
        GradientReducer([("table.weight", table.weight)], None).reduce(1.0)


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes=0"):
        GradientReducer([], None, Traffic(0))
