"""A model of many equal blocks trains as on one process, and its start-up runs each of its blocks no more than needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runner import run_ranks
from trainer_cases import ENV, Case, compare, make_trainer, run_cases


pytestmark = pytest.mark.timeout(400)

DEEP = {"model": "llama_deep", "steps": 3, "variable_length": True}
CASES = [
    Case("deep_pp2", parallel={"pp_size": 2, "num_microbatches": 4}, **DEEP),
    Case("deep_tp2", parallel={"tp_size": 2}, **DEEP),
    Case("deep_tp2_sequence", parallel={"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}}, **DEEP),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("few_blocks")
    whole = Case("one", parallel=None, **DEEP)
    return run_cases(CASES, 2, folder / "ranks") | run_cases([whole], 1, folder / "whole")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_deep_model_trains_as_on_one_process(case: Case, runs: dict[str, Any]) -> None:
    compare(runs[case.name], runs["one"])


def counting_main(rank: int, world_size: int, folder: str, layouts: dict[str, Any]) -> dict[str, list[int]]:
    """How often each block of the model, or a copy of it, runs before it is cut, by layout."""
    from accelerate.state import AcceleratorState
    from torch.nn.modules.module import register_module_forward_pre_hook

    from hf_parallel.engine import session

    stock, found = session.parallelize, {}
    for name, parallel in layouts.items():
        AcceleratorState._reset_state()
        counts = [0] * 16

        def count(module: Any, _: Any, counts: list[int] = counts) -> None:
            if type(module).__name__ == "LlamaDecoderLayer":
                counts[module.self_attn.layer_idx] += 1

        def parallelize(*args: Any, count: Any = count, **options: Any) -> Any:
            handle = register_module_forward_pre_hook(count)
            try:
                return stock(*args, **options)
            finally:
                handle.remove()

        session.parallelize = parallelize
        trainer = make_trainer(Case(name, model="llama_deep", steps=1, parallel=parallel), Path(folder) / name, 2)
        trainer.train()
        trainer.accelerator.hf_parallel.watchdog.stop()
        found[name] = counts
    return found


@pytest.mark.long
def test_a_block_that_others_show_runs_once_at_the_start(tmp_path: Path) -> None:
    layouts: dict[str, Any] = {
        "pp2": {"pp_size": 2},
        "tp2": {"tp_size": 2},
        "pp2_full": {"pp_size": 2, "pipeline": {"self_check": "full"}},
        "tp2_full": {"tp_size": 2, "tensor_parallel": {"self_check": "full"}},
    }
    here, _ = run_ranks(counting_main, 2, str(tmp_path), layouts, tmp_path=tmp_path, env=ENV, timeout=150)
    for name in ("pp2", "tp2"):
        assert here[name][3] == here[name][12] == 1, here[name]
        assert here[name][1] > 10, here[name]
        assert min(here[f"{name}_full"]) > 10, here[f"{name}_full"]


def failing_main(rank: int, world_size: int, folder: str) -> str:
    from hf_parallel.engine.plan import plans

    def fail(*args: Any, **options: Any) -> Any:
        raise KeyError("no blocks")

    genuine, plans.discover_stages = plans.discover_stages, fail
    try:
        trainer = make_trainer(Case("a", model="llama_deep", steps=1, parallel={"tp_size": 2}), Path(folder), 2)
        trainer.train()
    finally:
        plans.discover_stages = genuine
    trainer.accelerator.hf_parallel.watchdog.stop()
    return "trained"


@pytest.mark.long
def test_blocks_that_cannot_be_looked_for_are_all_planned(tmp_path: Path) -> None:
    assert run_ranks(failing_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV) == ["trained"] * 2
