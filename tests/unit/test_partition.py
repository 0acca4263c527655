"""Block ranges: every block once, in order, and no cheaper maximum exists."""

from __future__ import annotations

import itertools
import random

import pytest
from stage_models import VOCAB, batch, build

from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.discover import discover_stages
from hf_parallel.pipeline_parallel.partition import StageCosts, block_costs, partition, stage_costs


GRID = [(n, s) for n in range(1, 10) for s in range(1, n + 1)]


def random_costs(num_blocks: int, seed: int) -> StageCosts:
    draw = random.Random(seed)
    return StageCosts(
        tuple(draw.choice([0.5, 1, 1, 2, 5]) for _ in range(num_blocks)), draw.random(), 4 * draw.random()
    )


@pytest.mark.parametrize(("num_blocks", "num_stages"), GRID)
def test_bounds_cover_all_blocks_in_order(num_blocks: int, num_stages: int) -> None:
    for split in ("even", "balanced"):
        bounds = partition(num_blocks, num_stages, split, random_costs(num_blocks, num_stages))
        assert (bounds[0], bounds[-1], len(bounds)) == (0, num_blocks, num_stages + 1)
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        assert min(sizes) >= 1
        assert split != "even" or max(sizes) - min(sizes) <= 1
        assert partition(num_blocks, num_stages, sizes) == bounds


@pytest.mark.parametrize(("num_blocks", "num_stages"), GRID)
def test_balanced_reaches_the_smallest_maximum_of_all_partitions(num_blocks: int, num_stages: int) -> None:
    costs = random_costs(num_blocks, 31 * num_blocks + num_stages)
    everything = [[0, *inner, num_blocks] for inner in itertools.combinations(range(1, num_blocks), num_stages - 1)]
    best = min(max(stage_costs(bounds, costs)) for bounds in everything)
    got = stage_costs(partition(num_blocks, num_stages, "balanced", costs), costs)
    assert max(got) == pytest.approx(best, rel=1e-12)
    squares = min(
        sum(c * c for c in stage_costs(b, costs))
        for b in everything
        if max(stage_costs(b, costs)) <= best * (1 + 1e-12)
    )
    assert sum(c * c for c in got) == pytest.approx(squares, rel=1e-12)


def test_an_expensive_head_takes_blocks_from_the_last_stage() -> None:
    assert partition(8, 2, "balanced", StageCosts((1.0,) * 8, 0.0, 4.0)) == [0, 6, 8]
    assert partition(8, 2, "balanced") == [0, 4, 8]
    assert partition(5, 3, "even") == [0, 2, 4, 5]


def test_misfits_are_refused_with_numbers() -> None:
    with pytest.raises(PlanError, match="= 6 stages need at least one block each, but the model has 4 blocks"):
        partition(4, 6, "even")
    with pytest.raises(PlanError, match=r"split=\[2, 1\] has 2 entries that sum to 3; it needs 2 entries.*5 blocks"):
        partition(5, 2, [2, 1])
    with pytest.raises(PlanError, match=r"split=\[5, 0\]"):
        partition(5, 2, [5, 0])
    with pytest.raises(PlanError, match="'evenly' is unknown"):
        partition(5, 2, "evenly")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="costs name 3 blocks, the model has 5"):
        partition(5, 2, "balanced", StageCosts((1.0,) * 3))


def test_costs_are_two_flops_per_weight_and_token_and_the_head_counts_when_tied() -> None:
    model = build("llama_tied")
    costs = block_costs(model, discover_stages(model, batch()), num_tokens=10)
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    attention = 2 * 2 * 8 * 32 * 10  # two products of each token with the 8 tokens of the sample, width 32
    assert costs.blocks == pytest.approx([2 * weights * 10 + attention] * 5)
    assert costs.last == pytest.approx(2 * VOCAB * 32 * 10)
    assert costs.first < 0.01 * costs.blocks[0]


def test_costs_of_a_mixture_count_the_routed_experts_only() -> None:
    model = build("mixtral")
    block = block_costs(model, discover_stages(model, batch())).blocks[0]
    everything = 2 * sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim > 1)
    assert 0.4 * everything < block < 0.8 * everything
