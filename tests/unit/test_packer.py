"""If these fail, buckets are sent with elements of other memory in them, or gradients are multiplied by two factors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hf_parallel.data_parallel.buckets import Packer, lay_out
from hf_parallel.data_parallel.buffer_pool import BufferPool


SHAPES = [(3, 4), (5,), (2, 2)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def packer(*, align: int = 1) -> tuple[Packer, list[nn.Parameter], list[Tensor]]:
    """Of one bucket, with its parameters in the bucket's order and a gradient of each."""
    named = [(f"p{index}", nn.Parameter(torch.zeros(shape))) for index, shape in enumerate(SHAPES)]
    (bucket,) = lay_out(named, align=align)
    for param in bucket.params:
        param.grad = torch.randn(param.shape)
    return (
        Packer([bucket], BufferPool(keeps=False), flagged=True),
        list(bucket.params),
        [param.grad.clone() for param in bucket.params],
    )


def test_a_gradient_moves_when_it_arrives_and_the_others_with_its_factor() -> None:
    moving, params, gradients = packer()
    moving.factor = 0.5
    moving.arrived(0, 1)
    assert [param.grad is None for param in params] == [False, True, False]
    assert moving.has_begun
    moving.factor = 0.25
    packed = moving.pack(0)
    assert (packed.factor, packed.present, moving.has_begun) == (0.5, (True, True, True), False)
    assert torch.equal(packed.flat, torch.cat([*(gradient.flatten() * 0.5 for gradient in gradients), torch.ones(3)]))
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("align", [1, 8])
def test_what_no_gradient_fills_is_zero(arrives: bool, align: int) -> None:
    moving, params, gradients = packer(align=align)
    params[0].grad = None
    if arrives:
        moving.arrived(0, 2)
        moving.arrived(0, 0)  # has none
    packed = moving.pack(0)
    assert packed.present == (False, True, True)
    assert packed.flat[-3:].tolist() == [0.0, 1.0, 1.0]
    assert packed.flat.isfinite().all()
    assert packed.flat[:-3].count_nonzero() == sum(gradient.numel() for gradient in gradients[1:])


@pytest.mark.parametrize(
    ("elements", "buckets"),
    [
        ([4, 4, 4, 4], [8, 8]),
        ([5, 4, 4], [8, 5]),
        ([4, 100, 4], [104, 4]),
        ([100, 4, 4], [8, 100]),
        ([8, 2, 9], [9, 10]),
    ],
)
def test_a_bucket_that_reaches_its_size_is_closed(elements: list[int], buckets: list[int]) -> None:
    named = [(f"p{index}", nn.Parameter(torch.zeros(count))) for index, count in enumerate(elements)]
    assert [bucket.numel for bucket in lay_out(named, 8 * 4)] == buckets


def test_half_precision_gradients_arrive_in_the_dtype_of_the_sum() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    (bucket,) = lay_out([("p", param)])
    param.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    moving = Packer([bucket], BufferPool(keeps=False), flagged=False)
    moving.factor = 1 / 3
    moving.arrived(0, 0)
    assert torch.equal(moving.pack(0).flat, torch.tensor([1.0, 2.0, 3.0]) * (1 / 3))
