"""A layout that loses, repeats or misplaces an element corrupts training and checkpoints silently."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import Section, ShardSpec, split_sizes, split_units
from hf_parallel.tensor_parallel.run.apply import shard_parameter
from hf_parallel.tensor_parallel.units import most_of


SPECS = [
    ShardSpec.contiguous(0, 8),
    ShardSpec.contiguous(1, 7),
    ShardSpec.contiguous(0, 1),
    ShardSpec(0, (Section(6, True), Section(6, True))),
    ShardSpec(1, (Section(5, True), Section(3, True), Section(3, True))),
    ShardSpec(0, (Section(8, True), Section(3, False), Section(2, False))),
    ShardSpec(1, (Section(2, False), Section(9, True), Section(1, False), Section(4, True))),
    ShardSpec(0, (Section(5, False),)),
    ShardSpec(0, (Section(36, True, 4), Section(12, True, 4))),
    ShardSpec(2, (Section(9, True, 0), Section(2, False))),
]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 8, 97])
def test_pieces_cover_the_size_and_the_first_ranks_get_the_ceil(size: int, parts: int) -> None:
    sizes = split_sizes(size, parts)
    assert sum(sizes) == size
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == -(-size // parts)


def test_units_are_shared_out_evenly_and_never_cut() -> None:
    assert split_units(36, 4, 4) == [12, 8, 8, 8]
    assert split_units(9, 4, 0) == [3, 2, 2, 2]
    assert split_units(9, 4, 1) == split_sizes(9, 4) == [3, 3, 3, 0]


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (14336, 3, [4784, 4784, 4768]),
        (11008, 3, [3672, 3672, 3664]),
        (11008, 4, [2752] * 4),
        (11004, 4, [2751] * 4),
        (50257, 2, [25136, 25121]),
        (1000, 3, [334, 334, 332]),
    ],
)
def test_long_pieces_that_are_not_even_are_what_kernels_read_at_once(
    size: int, parts: int, expected: list[int]
) -> None:
    assert split_sizes(size, parts) == split_units(size, parts, 1) == expected
    assert most_of(size, parts) == expected[0]


def test_pieces_after_the_elements_run_out_are_empty() -> None:
    assert split_sizes(5, 4) == [2, 2, 1, 0]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_assembling_the_shards_gives_the_full_tensor(spec: ShardSpec, tp_size: int) -> None:
    shape = [3, 4, 5]
    shape[spec.dim] = spec.full_size
    full = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    shards = [spec.shard(full, tp_size, rank) for rank in range(tp_size)]
    assert torch.equal(spec.assemble(shards), full)
    for rank, shard in enumerate(shards):
        assert shard.shape[spec.dim] == spec.local_size(tp_size, rank) == len(spec.index(tp_size, rank))
        assert torch.equal(shard, full.index_select(spec.dim, spec.index(tp_size, rank)))
        assert shard.is_contiguous()
        assert shard.untyped_storage().nbytes() == shard.numel() * shard.element_size()
        assert shard.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_element_is_counted_once(spec: ShardSpec, tp_size: int) -> None:
    count = torch.zeros(spec.full_size, dtype=torch.long)
    for rank in range(tp_size):
        index = spec.index(tp_size, rank)
        ranges = spec.counted(tp_size, rank)
        for start, length in ranges:
            assert length > 0
            count[index[start : start + length]] += 1
        assert all(a + b < start for (a, b), (start, _) in itertools.pairwise(ranges)), "not merged"
    assert torch.equal(count, torch.ones_like(count))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_layout_survives_json(spec: ShardSpec) -> None:
    assert ShardSpec.from_json(spec.to_json()) == spec


def test_a_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"shape \(5, 2\).*expects 8 positions along dim 0"):
        ShardSpec.contiguous(0, 8).shard(torch.zeros(5, 2), 2, 0)


def test_shards_in_the_wrong_order_are_refused() -> None:
    spec = ShardSpec.contiguous(0, 5)
    with pytest.raises(PlanError, match=r"tp rank 0 has shape \(2,\).*expects 3"):
        spec.assemble([torch.zeros(2), torch.zeros(3)])


def test_a_graph_of_the_whole_weight_that_somebody_keeps_does_not_shape_the_gradients_of_the_shard() -> None:
    layer, x = nn.Linear(4, 8), torch.ones(2, 4)
    kept = layer(x)
    shard_parameter(layer, "weight", ShardSpec.contiguous(0, 8), 2, 1)
    (x @ layer.weight.t()).sum().backward()  # torch: "got [4, 4] but expected shape compatible with [8, 4]"
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (4, 4)
    assert layer.weight.dtype == torch.float32
    del kept
