"""Ranks of different speed and memory: the cut gives each what it can do, and never more than it can hold.

If these fail, a slow card sets the pace of all, or a small one runs out of memory in the first step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from stage_models import VOCAB, build

from hf_parallel.engine.plan.held import holding_of
from hf_parallel.engine.plan.plans import describe_limits
from hf_parallel.engine.plan.rank_limits import RankLimits, products_per_s, rank_limits, stage_memory
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.plan.stages import Cut
from hf_parallel.errors import ConfigError, PlanError
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.ledger import build_ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.samples import probe_samples
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, block_costs, stage_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.partition import partition, step_time
from hf_parallel.pipeline_parallel.plan.predict_cut import predict
from hf_parallel.pipeline_parallel.plan.stage_memory import StageMemory
from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


# Ranks, schedule, stages on each of them, blocks: few enough for every cut to be tried.
SHAPES = [
    *((2, "1f1b", 1, 16), (3, "1f1b", 1, 14), (4, "1f1b", 1, 12), (4, "gpipe", 1, 11)),
    *((2, "interleaved_1f1b", 2, 10), (2, "zbv_zero_bubble", 2, 10), (2, "dualpipev", 2, 9)),
]


class Cluster:
    """A random model, schedule and set of ranks."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        ranks, name, per_rank, self.num_blocks = SHAPES[seed % len(SHAPES)]
        settings = HFParallelConfig(pp_size=ranks, pipeline={"schedule": name}).pipeline
        self.schedule = ScheduleChoice(settings, ranks).training(draw.choice([ranks, 2 * ranks]))
        self.num_stages = ranks * per_rank
        blocks = tuple(draw.uniform(0.8, 1.2) if seed % 2 else 1.0 for _ in range(self.num_blocks))
        self.costs = StageCosts(blocks, draw.random(), 2 * draw.random())
        self.of_ranks = [draw.choice([1.0, 1.0, draw.uniform(0.2, 1.0)]) for _ in range(ranks)]
        self.speeds = [self.of_ranks[rank] for rank in placement_of(self.schedule)]
        self.draw, self.ranks = draw, ranks

    def cuts(self) -> Iterator[list[int]]:
        """Every cut."""
        for inner in itertools.combinations(range(1, self.num_blocks + 1), self.num_stages - 1):
            yield [0, *inner, self.num_blocks]

    def time(self, bounds: list[int]) -> float:
        return step_time(bounds, self.costs, self.schedule, self.speeds)

    def at_least(self, bounds: list[int]) -> float:
        """What the busiest rank computes."""
        busy = [0.0] * self.ranks
        count = 1 + max(action.microbatch for action in self.schedule[0])
        times = stage_costs(bounds, self.costs.of_both(), self.speeds)
        for rank, own in zip(placement_of(self.schedule), times, strict=True):
            busy[rank] += own * count
        return max(busy)

    def best(self, cuts: list[list[int]]) -> float:
        """The shortest step of them."""
        found = float("inf")
        for bounds in sorted(cuts, key=self.at_least):
            if self.at_least(bounds) >= found:
                break
            found = min(found, self.time(bounds))
        return found

    def memory(self) -> StageMemory:
        """Needs of a block for weights and activations, and ranks that have from too little to plenty of it."""
        parts: list[dict[int, float]] = [{number: 1.0} for number in range(self.num_blocks + 1)]
        parts[0][-1] = parts[-1][-1] = 3.0  # a tied embedding
        saved = (*(0.1 for _ in range(self.num_blocks)), 0.5)
        mean = (self.num_blocks + 6) / self.ranks
        limits = tuple(mean * self.draw.uniform(0.7, 2.5) for _ in range(self.ranks))
        return StageMemory(tuple(parts), saved, limits, self.schedule)


def test_the_cut_for_ranks_of_different_speed_is_near_the_best_of_all_cuts() -> None:
    worse = []
    for seed in range(200):
        here = Cluster(seed)
        mine = partition(
            *(here.num_blocks, here.num_stages, "balanced", here.costs), schedule=here.schedule, speeds=here.speeds
        )
        worse.append(here.time(mine) / here.best(list(here.cuts())))
    assert max(worse) <= 1.1, sorted(worse)[-5:]
    assert sum(worse) / len(worse) <= 1.01


def test_no_cut_exceeds_a_ranks_memory_and_one_is_found_where_there_is_one() -> None:
    tight = refused = 0
    for seed in range(140):
        here = Cluster(seed)
        memory = here.memory()
        free = partition(
            *(here.num_blocks, here.num_stages, "balanced", here.costs), schedule=here.schedule, speeds=here.speeds
        )
        fitting = [bounds for bounds in here.cuts() if not memory.excess(bounds)]
        options: dict[str, Any] = {"schedule": here.schedule, "speeds": here.speeds, "memory": memory}
        if not fitting:
            refused += 1
            with pytest.raises(PlanError, match=r"pipeline\.rank_memory_gb=\[.*is not enough.*rank 0 would hold"):
                partition(here.num_blocks, here.num_stages, "balanced", here.costs, **options)
            continue
        mine = partition(here.num_blocks, here.num_stages, "balanced", here.costs, **options)
        held = memory.of_ranks(mine)
        assert all(own <= limit for own, limit in zip(held, memory.limits, strict=True))
        assert here.time(mine) <= 1.1 * here.best(fitting), seed
        tight += mine != free
    assert tight > 15, "the limits hardly ever mattered"
    assert refused > 15


def test_memory_alone_moves_blocks_from_a_small_rank() -> None:
    schedule = ScheduleChoice(HFParallelConfig(pp_size=2).pipeline, 2).training(4)
    parts = tuple({number: 1.0} for number in range(9))
    memory = StageMemory(parts, (0.0,) * 9, (3.0, 100.0), schedule)
    assert partition(8, 2, "balanced", StageCosts((1.0,) * 8), schedule=schedule) == [0, 4, 8]
    assert partition(8, 2, "balanced", StageCosts((1.0,) * 8), schedule=schedule, memory=memory) == [0, 3, 8]
    live = StageMemory(parts, (0.5,) * 9, (4.0, 100.0), schedule)  # two microbatches wait on the first stage of 1f1b
    assert partition(8, 2, "balanced", StageCosts((1.0,) * 8), schedule=schedule, memory=live) == [0, 2, 8]


def test_equal_speeds_and_plenty_of_memory_give_a_step_as_short_as_without() -> None:
    schedule: Schedule = ScheduleChoice(HFParallelConfig(pp_size=4).pipeline, 4).training(8)
    for seed in range(20):
        draw = random.Random(seed)
        costs = StageCosts(tuple(draw.random() for _ in range(12)), draw.random(), draw.random())
        plain = partition(12, 4, "balanced", costs, schedule=schedule)
        same = partition(12, 4, "balanced", costs, schedule=schedule, speeds=[2.0] * 4)
        assert step_time(same, costs, schedule) <= step_time(plain, costs, schedule) * (1 + 1e-9)


def setup_of(model: torch.nn.Module, dp_size: int = 1, **settings: Any) -> Setup:
    """As on rank 0 of a mesh, alone."""
    config = HFParallelConfig(**settings)
    shape = MeshShape(dp_size, config.pp_size, 1)
    mesh = Mesh(shape, 0, timedelta(seconds=60), Links(1, shape.world_size, shape.world_size))
    names = [shape.describe(rank) for rank in range(shape.world_size)]
    schedule = ScheduleChoice(config.pipeline, config.pp_size)
    return Setup(model, config, schedule, mesh, torch.device("cpu"), Watchdog(None, 0, names, 60.0))


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma3n", "bloom"])
def test_the_counted_bytes_are_those_of_the_ledger(kind: str) -> None:
    model = build(kind).train()
    setup = setup_of(model, dp_size=2, pp_size=2, zero={"stage": 1})
    plan = discover_stages(model, probe_samples(model, VOCAB))
    memory = stage_memory(setup, plan, None, (1e12, 1e12))
    for bounds in ([0, 1, plan.num_blocks], [0, 2, plan.num_blocks]):
        costs = block_costs(model, plan)
        cut = Cut(plan, setup.schedule, costs, bounds, "tokens", BackwardKind())
        ledger = build_ledger(model, pp_size=2, holds=cut.holds, specs={}, home=0)
        holdings = [holding_of(model, ledger, rank, 1) for rank in (0, 1)]
        found = predict(plan, bounds, costs, setup.schedule.typical(), holdings)
        for own, rank in zip(memory.of_ranks(bounds), found.ranks, strict=True):
            kept = rank.holding.weights + rank.holding.gradients + rank.holding.optimizer / 2
            assert own == pytest.approx(kept + plan.num_tokens * rank.activations, rel=1e-6)


def test_frozen_weights_need_neither_gradients_nor_states() -> None:
    model = build("llama").train()
    plan = discover_stages(model, probe_samples(model, VOCAB))
    trained = stage_memory(setup_of(model, pp_size=2), plan, None, (1e12, 1e12))
    model.requires_grad_(False)
    frozen = stage_memory(setup_of(model, pp_size=2), plan, None, (1e12, 1e12))
    for part, other in zip(trained.parts, frozen.parts, strict=True):
        assert sum(part.values()) == pytest.approx(4 * sum(other.values()))


def test_given_limits_are_taken_as_they_are() -> None:
    model = build("llama")
    pipeline = {"rank_speed": [2, 1], "rank_memory_gb": [24, 8.5]}
    limits = rank_limits(setup_of(model, pp_size=2, pipeline=pipeline))
    assert limits == RankLimits((1.0, 0.5), (24e9, 8.5e9))
    assert limits.stage_speeds((0, 1, 1, 0)) == (1.0, 0.5, 0.5, 1.0)
    assert describe_limits(limits) == [
        "speed of the pipeline's ranks: 1.00, 0.50",
        "memory of the pipeline's ranks: 24.00, 8.50 GB",
    ]
    assert rank_limits(setup_of(model, pp_size=2, pipeline={"rank_speed": [3, 3]})) == RankLimits()


def test_the_prediction_counts_with_the_speed_of_each_rank() -> None:
    model = build("llama").train()
    plan = discover_stages(model, probe_samples(model, VOCAB))
    costs = block_costs(model, plan)
    setup = setup_of(model, pp_size=2)
    ledger = build_ledger(model, pp_size=2, holds=lambda rank, name: True, specs={}, home=0)
    holdings = [holding_of(model, ledger, rank, 1) for rank in (0, 1)]
    bounds, schedule = [0, 2, plan.num_blocks], setup.schedule.typical()
    plain = predict(plan, bounds, costs, schedule, holdings)
    slow = predict(plan, bounds, costs, schedule, holdings, (1.0, 0.5))
    assert slow.stages[0].forward == plain.stages[0].forward
    assert slow.stages[1].backward == pytest.approx(2 * plain.stages[1].backward)
    assert slow.step == pytest.approx(step_time(bounds, costs, schedule, (1.0, 0.5)))


def test_a_rank_measures_its_products() -> None:
    assert products_per_s(build("llama"), torch.device("cpu"), seconds=0.01) > 0


@pytest.mark.parametrize(
    ("pipeline", "text"),
    [
        ({"rank_speed": [1, 2, 3]}, r"pipeline\.rank_speed=\[1.0, 2.0, 3.0\] has 3 entries for pp_size=2.*Give 2 numbers"),
        ({"rank_memory_gb": [8]}, r"pipeline\.rank_memory_gb=\[8.0\] has 1 entries for pp_size=2"),
        ({"rank_speed": [1, 0]}, r"pipeline\.rank_speed=\[1, 0\]: expected .*numbers above 0.*Set pipeline\.rank_speed to null"),
        ({"rank_speed": [1, float("inf")]}, r"pipeline\.rank_speed=\[1, inf\]: expected"),
        ({"rank_memory_gb": "all"}, r"pipeline\.rank_memory_gb='all': expected GB that each pipeline rank may hold"),
        ({"rank_speed": "auto", "split": "even"}, r"pipeline\.rank_speed='auto' with pipeline\.split='even' has no effect"),
        ({"rank_memory_gb": [1, 2], "split": [2, 2]}, r"pipeline\.rank_memory_gb=.*split=\[2, 2\] has no effect"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(pipeline: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HFParallelConfig(pp_size=2, pipeline=pipeline)


@pytest.mark.parametrize("name", ["rank_speed", "rank_memory_gb"])
def test_ranks_without_stages_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"pipeline\.{name}='auto' with pp_size=1 has no effect"):
        HFParallelConfig(pipeline={name: "auto"})
