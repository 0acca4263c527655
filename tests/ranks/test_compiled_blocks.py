"""Blocks that are compiled by themselves train as eager ones of one process, whatever else is done to the model.

If these fail, a compiled block leaves out what training does around it, gathering and recomputing, or is not compiled at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from thinning import slow_if
from trainer_cases import NO_NOISE, Case, compare, run_all, run_cases, stock, wanted_cases


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

COMPILED = {"compile_blocks": "aot_eager"}
AS: dict[str, Any] = {"variable_length": True, "steps": 3, "arguments": NO_NOISE}


def case_of(name: str, model: str = "llama_tied", **parallel: Any) -> Case:
    return Case(name, model=model, parallel={**COMPILED, **parallel}, **AS)


CASES = [
    case_of("dp2"),
    case_of("dp2_gpt2", "gpt2"),
    case_of("zero1", zero={"stage": 1}),
    case_of("zero2", zero={"stage": 2}),
    case_of("zero3", zero={"stage": 3}),
    case_of("dp2_recomputed", activation_checkpointing={"every": 2}),
    case_of("dp2_alternate_offloaded", activation_checkpointing={"every": 2, "mode": "alternate", "offload": True}),
    case_of("zero3_recomputed", zero={"stage": 3}, activation_checkpointing={"every": 1}),
    case_of("pp2_recomputed", pp_size=2, activation_checkpointing={"every": 2}),
    case_of("pp2_dp2_zero1", pp_size=2, zero={"stage": 1}),
]


MESHES = ("pp2_dp2_zero1",)
# Slow: what other rows do too, one thing less.
REST = ("zero1", "zero3", "dp2_recomputed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    wanted = wanted_cases(request, CASES)
    found = run_cases(list(map(stock, wanted)), 1, tmp_path_factory.mktemp("world1"))
    for world_size in (2, 4):
        mine = [case for case in wanted if (case.name in MESHES) == (world_size == 4)]
        found |= run_cases(mine, world_size, tmp_path_factory.mktemp(f"world{world_size}")) if mine else {}
    return found


@pytest.mark.parametrize("case", [pytest.param(case, marks=slow_if(case.name, REST), id=case.name) for case in CASES])
def test_compiled_blocks_train_as_eager_ones(case: Case, runs: dict[str, Any]) -> None:
    compare(runs[case.name], runs[f"stock_{case.name}"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}], ids=["dp2", "pp2"])
def test_blocks_that_inductor_compiles_train_as_eager_ones(layout: dict[str, Any], tmp_path: Path) -> None:
    case = case_of("inductor", compile_blocks="inductor", **layout)
    found = run_all({2: [case]}, tmp_path)
    compare(found["inductor"], found["stock_inductor"])


def counted(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[int, list[str]]:
    """Calls of compiled blocks in three steps of a model with more blocks than torch compiles of one function."""
    from accelerate import Accelerator
    from torch._dynamo.utils import counters

    from hf_parallel import HFParallelPlugin

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **settings))
    model = tiny.llama(layers=12)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.train()
    for length in (8, 8, 12):
        ids = torch.randint(1, tiny.VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    return counters["stats"]["unique_graphs"], sorted(counters["unimplemented"]) + sorted(counters["graph_break"])


RECOMPUTED = {"activation_checkpointing": {"every": 2}}


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"zero": {"stage": 3}}, {"pp_size": 2}, RECOMPUTED], ids=str
)
def test_every_block_is_compiled_and_none_falls_back(settings: dict[str, Any], tmp_path: Path) -> None:
    for graphs, breaks in run_ranks(counted, 2, {**COMPILED, **settings}, tmp_path=tmp_path):
        assert not breaks
        assert graphs >= 1
