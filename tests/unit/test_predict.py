"""If these fail, the start-up lines promise stages, times or memory that the cut does not have."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved_tensors import saved
from stage_models import VOCAB, batch, build

from hf_parallel.engine.plan.held import holding_of, whole_bytes
from hf_parallel.engine.plan.plans import make_plans, summary
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.plan.stages import cut_costs
from hf_parallel.errors import PlanError
from hf_parallel.ledger import build_ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.costs import StageCosts
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.measure import measure_costs
from hf_parallel.pipeline_parallel.plan.predict_cut import Holding, describe, predict, saved_per_token
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import peak_held, peak_live
from hf_parallel.pipeline_parallel.stage_plan import spans_of
from hf_parallel.settings.config import HFParallelConfig


COSTS = StageCosts((1.0, 1.0, 1.0, 1.0, 1.0), 0.0, 2.0)
HOLDING = Holding(1000, 4000, 4000, 8000)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_tied", "mixtral"])
@pytest.mark.parametrize("try_meta", [False, True])
def test_saved_activations_of_all_stages_add_up_to_what_autograd_keeps(name: str, try_meta: bool) -> None:
    model: Any = build(name)
    inputs = batch()
    plan = discover_stages(model, inputs, try_meta=try_meta)
    whole = saved(model, lambda: model(**inputs))[0] / inputs["input_ids"].numel()
    assert sum(saved_per_token(plan, [0, 2, 3, 5, 5])) == pytest.approx(sum(saved_per_token(plan, [0, 5])), rel=1e-9)
    assert sum(saved_per_token(plan, [0, 2, 3, 5, 5])) == pytest.approx(whole, rel=0.02)
    two, one, *_ = saved_per_token(plan, [0, 2, 3, 5, 5])
    assert two >= 1.9 * one > 0


def test_a_prediction_is_the_simulators_and_counts_live_microbatches_by_their_size() -> None:
    plan: Any = SimpleNamespace(
        num_blocks=5, sample_tokens=10, saved={0: 50, **{2 * j + 1: 100 for j in range(5)}, 10: 900}
    )
    schedule = build_schedule("1f1b", 2, 6)
    prediction = predict(plan, [0, 4, 5], COSTS, schedule, [HOLDING, HOLDING])
    assert [stage.blocks for stage in prediction.stages] == [(0, 4), (4, 5)]
    assert [(s.share, s.forward, s.backward) for s in prediction.stages] == [(4 / 7, 4.0, 8.0), (3 / 7, 3.0, 6.0)]
    assert [stage.saved for stage in prediction.stages] == [45.0, 100.0]
    assert [(rank.live, rank.activations) for rank in prediction.ranks] == [(2, 90.0), (1, 100.0)]
    assert prediction.step == 61 + 3 + 6 + 8  # the last forward leaves rank 0 at 61, and is followed by F, B and B
    assert prediction.bubble == pytest.approx(1 - 6 * 21 / (2 * 78))
    assert prediction.num_microbatches == 6


def test_peak_held_with_unit_sizes_is_peak_live() -> None:
    schedule = build_schedule("zbv_zero_bubble", 3, 5)
    assert peak_held(schedule, [1.0] * 6) == peak_live(schedule)
    heavy = peak_held(schedule, [0.0] * 5 + [7.0])
    assert heavy[1:] == (0.0, 0.0)
    assert heavy[0] >= 7.0


def test_lines_are_aligned_and_name_their_units() -> None:
    plan = discover_stages(build("llama_tied"), batch())
    for unit, head in (("FLOPs", "1 is the mean stage's"), ("ms", "measured ms for one row of at most 512 tokens")):
        costs = StageCosts(COSTS.blocks, COSTS.first, 9.0, unit=unit)  # type: ignore[arg-type]
        prediction = predict(plan, [0, 5, 5], costs, build_schedule("1f1b", 2, 4), [HOLDING, HOLDING])
        lines = describe(prediction, "model.layers")
        assert "cut of model.layers for steps of 4 microbatches" in lines[0]
        assert head in lines[0]
        assert len({len(line) for line in lines[1:4]}) == len({len(line) for line in lines[4:7]}) == 1
        assert lines[2].split() == [
            "0",
            "0",
            "0",
            "to",
            "4",
            "35.7%",
            *(["5.00", "10.00"] if unit == "ms" else ["0.24", "0.48"]),
        ]
        assert "head alone" in lines[3]
        assert "without messages, bubble" in lines[7]
        assert "temporary buffers are not counted" in lines[8]


def test_a_holding_counts_frozen_weights_without_gradients_and_adam_states_in_their_dtype() -> None:
    model: Any = build("llama_tied").to(torch.bfloat16)
    model.model.layers[0].requires_grad_(False)
    plan = discover_stages(model, batch())
    spans = spans_of([0, 2, 5])
    ledger = build_ledger(model, pp_size=2, holds=lambda rank, name: plan.holds(spans[rank], name), specs={})
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    table = model.model.embed_tokens.weight.numel()
    assert holding_of(model, ledger, 0, 1) == Holding(
        2 * block + table, 2 * (2 * block + table), 2 * (block + table), 4 * (block + table)
    )
    last = 3 * block + table + 32  # the tied head again, and the final norm
    assert holding_of(model, ledger, 1, 1) == Holding(last, 2 * last, 2 * last, 4 * last)


def test_a_holding_counts_weights_that_are_buffers() -> None:
    model: Any = build("llama_tied")
    for layer in model.model.layers:
        layer.mlp.register_buffer("qweight", torch.zeros(7, 11, dtype=torch.int32))  # as GPTQ and AWQ keep them
    plan = discover_stages(model, batch())
    spans = spans_of([0, 2, 5])

    def holds(rank: int, name: str) -> bool:
        return plan.holds(spans[rank], name)

    bare = build_ledger(build("llama_tied"), pp_size=2, holds=holds, specs={})
    ledger = build_ledger(model, pp_size=2, holds=holds, specs={})
    for rank, blocks in enumerate((2, 3)):
        packed, plain = holding_of(model, ledger, rank, 1), holding_of(model, bare, rank, 1)
        assert packed == dataclasses.replace(plain, weights=plain.weights + blocks * 7 * 11 * 4)
    assert whole_bytes(model, ledger) == whole_bytes(model, bare) + 5 * 7 * 11 * 4


class Silent:
    def runs(self, text: str) -> None:
        pass

    def waiting(self, text: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_measured_costs_reach_the_cut_and_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("llama_tied")
    slow_head = StageCosts((1.0,) * 5, 0.0, 20.0, StageCosts((2.0,) * 5, 0.0, 40.0), "ms")
    monkeypatch.setattr("hf_parallel.engine.plan.stages.measure_costs", lambda *args: slow_head)
    config = HFParallelConfig(pp_size=2, pipeline={"costs": "measured"})
    mesh = Mesh(MeshShape(1, 2, 1), 0, timedelta(seconds=60), Links(1, 2, 2))
    watchdog: Any = Silent()
    cpu = torch.device("cpu")
    schedule = ScheduleChoice(config.pipeline, config.pp_size)
    setup = Setup(model, config, schedule, mesh, cpu, watchdog)
    plans = make_plans(setup, Probes(model, cpu))
    assert plans.cut is not None
    assert plans.cut.bounds == [0, 5, 5]
    assert plans.prediction is not None
    assert (plans.prediction.unit, plans.prediction.num_microbatches) == ("ms", 4)
    assert sum(rank.holding.parameters for rank in plans.prediction.ranks) == VOCAB * 32 + sum(
        p.numel() for p in model.parameters()
    )
    assert any("head alone" in line for line in summary(plans, setup))


def test_a_batch_that_cannot_be_measured_is_a_plan_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> StageCosts:
        raise torch.OutOfMemoryError("out of memory")

    model: Any = build("llama_tied")
    monkeypatch.setattr("hf_parallel.engine.plan.stages.measure_costs", fails)
    plan, watchdog = discover_stages(model, batch()), Silent()
    assert measure_costs is not fails
    cpu, config = torch.device("cpu"), HFParallelConfig(pp_size=2, pipeline={"costs": "measured"})
    schedule = ScheduleChoice(config.pipeline, config.pp_size)
    probes, setup = Probes(model, cpu), Setup(model, config, schedule, None, cpu, watchdog)  # type: ignore[arg-type]
    with pytest.raises(
        PlanError,
        match=r"costs=measured: rank 0, .* OutOfMemoryError: out of memory\. .* set pipeline\.costs to analytic",
    ):
        cut_costs(setup, plan, probes)
