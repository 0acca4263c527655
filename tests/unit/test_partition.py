"""Block ranges: every block once, in order, and no cheaper maximum exists."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_models import VOCAB, batch, build

from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, block_costs, stage_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.partition import MAX_SIMULATIONS, partition, step_time
from hf_parallel.pipeline_parallel.plan.predict_cut import Holding, predict
from hf_parallel.pipeline_parallel.schedule.actions import Schedule
from hf_parallel.pipeline_parallel.schedule.schedules import SCHEDULES, build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import simulate


GRID = [(n, s) for n in range(1, 10) for s in range(1, n + 1)]


def random_costs(num_blocks: int, seed: int) -> StageCosts:
    draw = random.Random(seed)
    return StageCosts(
        tuple(draw.choice([0.5, 1, 1, 2, 5]) for _ in range(num_blocks)), draw.random(), 4 * draw.random()
    )


def all_partitions(num_blocks: int, num_stages: int, places: Iterable[int]) -> list[list[int]]:
    return [[0, *inner, num_blocks] for inner in itertools.combinations(sorted(places), num_stages - 1)]


@pytest.mark.parametrize(("num_blocks", "num_stages"), GRID)
def test_bounds_cover_all_blocks_in_order(num_blocks: int, num_stages: int) -> None:
    for split in ("even", "balanced"):
        bounds = partition(num_blocks, num_stages, split, random_costs(num_blocks, num_stages))
        assert (bounds[0], bounds[-1], len(bounds)) == (0, num_blocks, num_stages + 1)
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        assert min([*sizes[:-1], 1]) >= 1
        assert sizes[-1] >= 1 or (split == "balanced" and num_stages > 1)
        assert split != "even" or max(sizes) - min(sizes) <= 1
        assert partition(num_blocks, num_stages, sizes) == bounds


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize(("num_blocks", "num_stages"), GRID)
def test_balanced_reaches_the_smallest_maximum_of_all_partitions(num_blocks: int, num_stages: int, some: bool) -> None:
    costs = random_costs(num_blocks, 31 * num_blocks + num_stages)
    places = [b for b in range(1, num_blocks + 1) if not some or b % 3]
    everything = all_partitions(num_blocks, num_stages, places)
    if not everything:
        with pytest.raises(PlanError, match=f"need {num_stages - 1} cuts, but the model can be cut before the blocks"):
            partition(num_blocks, num_stages, "balanced", costs, allowed=places)
        return
    best = min(max(stage_costs(bounds, costs)) for bounds in everything)
    bounds = partition(num_blocks, num_stages, "balanced", costs, allowed=places if some else None)
    assert bounds in everything
    got = stage_costs(bounds, costs)
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


def test_a_head_dearer_than_its_share_stands_alone() -> None:
    costs = StageCosts((1.0,) * 8, 0.0, 9.0)
    assert partition(8, 2, "balanced", costs) == [0, 8, 8]
    assert partition(8, 2, "balanced", costs, allowed=range(1, 8)) == [
        0,
        7,
        8,
    ]  # 8, the cut before the head, has no address
    assert partition(4, 5, "balanced", costs=StageCosts((1.0,) * 4)) == [0, 1, 2, 3, 4, 4]
    assert partition(4, 5, "balanced") == [0, 1, 2, 3, 4, 4]
    assert partition(5, 2, [5, 0]) == [0, 5, 5]


def test_the_smallest_maximum_goes_before_the_smallest_sum_of_squares() -> None:
    costs = StageCosts((4.0, 2.0, 2.0, 4.0, 1.0, 2.0))  # 4, 4, 7 has the smaller sum of squares
    assert stage_costs(partition(6, 3, "balanced", costs), costs) == [6.0, 6.0, 3.0]


def test_misfits_are_refused_with_numbers() -> None:
    with pytest.raises(PlanError, match=r"= 6 stages need at least one block each, but the model has 4 blocks"):
        partition(4, 6, "even")
    with pytest.raises(PlanError, match=r"split=\[2, 1\] has 2 entries that sum to 3; it needs 2 entries.*5 blocks"):
        partition(5, 2, [2, 1])
    with pytest.raises(PlanError, match=r"split=\[0, 5\] has 2 entries that sum to 5"):
        partition(5, 2, [0, 5])
    with pytest.raises(PlanError, match=r"split=\[0\] has 1 entries that sum to 0"):
        partition(5, 1, [0])
    with pytest.raises(
        PlanError, match=r"= 6 stages need at least one block each .the last.* 4 blocks. Use at most 5 st"
    ):
        partition(4, 6, "balanced")
    with pytest.raises(PlanError, match="'evenly' is unknown"):
        partition(5, 2, "evenly")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="costs name 3 blocks, the model has 5"):
        partition(5, 2, "balanced", StageCosts((1.0,) * 3))


def test_costs_are_two_flops_per_weight_and_token_and_the_head_counts_when_tied() -> None:
    model = build("llama_tied")
    costs = block_costs(model, discover_stages(model, batch()), flops_per_byte=0.0)
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    attention = 2 * 2 * 8 * 32  # two products of each token with the 8 tokens of the sample, width 32
    assert costs.blocks == pytest.approx([2 * weights + attention] * 5)
    assert costs.last == pytest.approx(2 * VOCAB * 32)
    assert costs.first < 0.01 * costs.blocks[0]
    assert costs.of_backward() == StageCosts(tuple(2 * c for c in costs.blocks), 2 * costs.first, 2 * costs.last)


def test_traffic_of_the_loss_and_the_embedding_is_counted_and_a_recomputed_block_costs_a_forward_more() -> None:
    model = build("llama_tied")
    plan = discover_stages(model, batch())
    products = block_costs(model, plan, flops_per_byte=0.0)
    both = block_costs(model, plan, flops_per_byte=2.0, recomputed=True)
    logits = 4.0 * VOCAB  # bytes a token; the cross entropy at least writes and reads its log-softmax
    assert 2.0 * 2 * logits < both.last - products.last < 2.0 * 30 * logits
    assert both.first - products.first > 2.0 * 4 * 32  # the embedding's output is written
    assert both.of_backward().blocks == pytest.approx([3 * c for c in both.blocks])
    assert both.of_backward().last == 2 * both.last
    assert both.of_weights().blocks == pytest.approx(both.blocks)  # what runs again is no gradient of a weight


def test_a_frozen_layer_costs_the_gradient_of_its_input_and_only_above_a_trained_one() -> None:
    model = build("llama_tied")
    plan = discover_stages(model, batch())
    model.requires_grad_(False)
    model.model.layers[2].mlp.up_proj.requires_grad_(True)
    costs = block_costs(model, plan)
    ratios = [b / f for f, b in zip(costs.blocks, costs.of_backward().blocks, strict=True)]
    weights = sum(p.numel() for p in model.model.layers[2].parameters() if p.ndim == 2)
    share = model.model.layers[2].mlp.up_proj.weight.numel() / weights
    assert ratios == pytest.approx([0, 0, 1 + share, 1, 1])
    assert costs.of_backward().first == 0
    assert costs.of_backward().last == costs.last
    assert costs.of_weights() == StageCosts((0, 0, pytest.approx(share * costs.blocks[2]), 0, 0), 0, 0)
    again = block_costs(model, plan, recomputed=True)
    assert again.of_backward().blocks == pytest.approx(
        [0, 0, *(b + f for f, b in zip(costs.blocks[2:], costs.of_backward().blocks[2:], strict=True))]
    )


def test_a_schedule_fills_bubbles_with_gradients_of_trained_weights_only() -> None:
    model, schedule = build("llama_tied"), build_schedule("zbv_zero_bubble", 2, 4)
    plan = discover_stages(model, batch())
    bubbles, bounds = [], [0, 1, 3, 4, 5]
    for trained in (True, False):
        model.requires_grad_(trained)
        model.model.layers[0].mlp.up_proj.requires_grad_(True)
        costs = block_costs(model, plan)
        bubbles.append(predict(plan, bounds, costs, schedule, [Holding(1, 4, 4, 8)] * 2).bubble)
    assert bubbles[1] > bubbles[0] + 0.03


def test_costs_of_a_mixture_count_the_routed_experts_only() -> None:
    model = build("mixtral")
    block = block_costs(model, discover_stages(model, batch()), flops_per_byte=0.0).blocks[0]
    everything = 2 * sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim > 1)
    assert 0.4 * everything < block < 0.8 * everything


positive = st.floats(0.01, 10.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, StageCosts]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp_size, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 9))
    stages = draw(st.integers(2, 3)) if SCHEDULES[name].fixed_stages_per_rank is None else 0
    num_stages = pp_size * (stages or SCHEDULES[name].stages_per_rank_default)
    blocks = tuple(draw(st.lists(positive, min_size=num_stages, max_size=num_stages + 8)))
    back = StageCosts(tuple(draw(positive) for _ in blocks), draw(positive), draw(positive))
    costs = StageCosts(blocks, draw(positive), draw(st.floats(0.01, 40.0)), draw(st.sampled_from([None, back])))
    return name, pp_size, microbatches, stages, costs


@given(cases())
@settings(max_examples=150, deadline=None)
def test_balanced_is_never_slower_than_even_or_than_the_smallest_maximum(
    case: tuple[str, int, int, int, StageCosts],
) -> None:
    name, pp_size, microbatches, stages, costs = case
    schedule = build_schedule(name, pp_size, microbatches, stages_per_rank=stages or None)
    sizes = (len(costs.blocks), sum(len({action.stage for action in actions}) for actions in schedule))
    bounds = partition(*sizes, "balanced", costs, schedule=schedule)
    assert bounds == partition(*sizes, "balanced", costs, schedule=schedule)
    mine = step_time(bounds, costs, schedule)
    assert mine <= step_time(partition(*sizes, "even"), costs, schedule)
    assert mine <= step_time(partition(*sizes, "balanced", costs), costs, schedule)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"])
def test_refinement_comes_near_the_best_of_all_cuts(name: str) -> None:
    schedule = build_schedule(name, 2, 6)

    def losses(split_with: Schedule | None, costs_of: Callable[[int], StageCosts]) -> list[float]:
        found = []
        for costs in map(costs_of, range(12)):
            best = min(step_time(b, costs, schedule) for b in all_partitions(10, 4, range(1, 11)))
            mine = partition(10, 4, "balanced", costs, schedule=split_with)
            found.append(step_time(mine, costs, schedule) / best - 1)
        return found

    assert max(losses(schedule, lambda seed: StageCosts((1.0,) * 10, 0.02, 0.6 * seed))) < 0.002  # transformers
    random = losses(schedule, lambda seed: random_costs(10, seed))
    assert sum(random) / 12 < 0.01
    assert sum(random) < 0.25 * sum(losses(None, lambda seed: random_costs(10, seed)))


def test_a_cut_without_address_is_never_chosen_by_the_refinement_either() -> None:
    schedule = build_schedule("zbv_zero_bubble", 2, 4)
    for seed in range(10):
        bounds = partition(12, 4, "balanced", random_costs(12, seed), allowed=(2, 3, 5, 8, 9, 11), schedule=schedule)
        assert set(bounds[1:-1]) <= {2, 3, 5, 8, 9, 11}


def test_eighty_blocks_on_sixteen_stages_are_cut_with_a_bounded_number_of_simulations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = StageCosts(tuple(1.0 + 0.3 * (i % 7) for i in range(80)), 0.5, 9.0)
    schedule = build_schedule("interleaved_1f1b", 8, 32)
    simulated = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal simulated
        simulated += 1
        return simulate(*args, **kwargs)

    monkeypatch.setattr("hf_parallel.pipeline_parallel.plan.partition.simulate", counted)
    partition(80, 16, "balanced", costs, schedule=schedule)
    assert 0 < simulated <= MAX_SIMULATIONS + 2  # the two starts beside the moves


def test_the_numbers_of_the_docs_are_the_simulators() -> None:
    text = " ".join((Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text().split())
    costs = StageCosts((1.0,) * 32, 0.0, 2.26)
    figures = {}
    for ranks in (4, 8):
        schedule = build_schedule("1f1b", ranks, 4 * ranks)
        even, mine = (partition(32, ranks, split, costs, schedule=schedule) for split in ("even", "balanced"))
        timed = [simulate(schedule, stage_costs(b, costs), stage_costs(b, costs.of_backward())) for b in (even, mine)]
        figures[ranks] = (*(t.bubble_fraction for t in timed), timed[0].makespan / timed[1].makespan)
        if ranks == 4:
            assert "Blocks of {}, {}, {} and {} give".format(*(b - a for a, b in itertools.pairwise(mine))) in text
    assert f"gives {figures[4][0]:.1%} idle time".replace("%", " %") in text
    assert f"give {figures[4][1]:.1%} and a step {figures[4][2]:.2f} times as fast".replace("%", " %") in text
    assert f"it is {figures[8][2]:.2f} times." in text
    small, schedule = StageCosts((1.0,) * 24, 0.0, 8.28), build_schedule("1f1b", 4, 16)
    even, mine = (
        step_time(partition(24, 4, s, small, schedule=schedule), small, schedule) for s in ("even", "balanced")
    )
    assert f"8.28 blocks for a Qwen2.5-0.5B, {even / mine:.2f} times on 4 ranks" in text
