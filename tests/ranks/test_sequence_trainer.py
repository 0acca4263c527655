"""A stock Trainer with sequence parallelism trains as one process does, on every mesh it can be part of.

If a row fails, setting `tensor_parallel.sequence_parallel: true` changes what users train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runner import run_ranks
from thinning import slow_if
from trainer_cases import ENV, NO_NOISE, Case, compare, make_trainer, run_all, wanted_cases


# All runs happen in the set-up of the first test.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SP: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True}
SP_PP2 = {**SP, "pp_size": 2, "num_microbatches": 3}
VARIABLE: dict[str, Any] = {"accumulation": 2, "variable_length": True, "steps": 3}
# In batches of variable length one bias of gpt2 has gradients of 1e-5 and below, which AdamW takes for whole steps: there
# plain tensor parallelism is as far from one process as sequence parallelism is.
ACCUMULATED: dict[str, Any] = {"accumulation": 2, "steps": 3, "arguments": NO_NOISE}

TWO_RANKS = [
    Case("sp2_tied", model="llama_tied", parallel=SP, evaluate=True, metrics=True, **VARIABLE),
    Case("sp2_qwen3", model="qwen3", parallel=SP, **VARIABLE),
    Case("sp2_gpt2", model="gpt2", parallel=SP, **ACCUMULATED),
    Case("sp2_mixtral", model="mixtral", parallel=SP, steps=3),
    Case("sp2_mamba", model="mamba", parallel=SP, arguments=NO_NOISE, steps=3),
    Case("sp2_checkpointing", parallel=SP, arguments={"gradient_checkpointing": True}, **VARIABLE),
    Case("sp2_recomputed", parallel={**SP, "activation_checkpointing": {"every": 2, "offload": True}}, **VARIABLE),
    Case("sp2_selective", parallel={**SP, "activation_checkpointing": {"every": 2, "mode": "selective"}}, **VARIABLE),
]
FOUR_RANKS = [
    Case("sp2_pp2", model="llama_tied", parallel=SP_PP2, **VARIABLE),
    Case("sp2_pp2_gpt2", model="gpt2", parallel=SP_PP2, **ACCUMULATED),
    Case(
        "sp2_pp2_qwen3",
        model="qwen3",
        parallel={**SP_PP2, "activation_checkpointing": {"every": 1, "offload": True}},
        **VARIABLE,
    ),
    Case("sp2_pp2_zero_bubble", parallel={**SP_PP2, "schedule": "zbv_zero_bubble", "num_microbatches": 4}, **VARIABLE),
    Case("sp2_dp2", model="llama_tied", parallel=SP, **VARIABLE),
    Case("sp2_dp2_gpt2", model="gpt2", parallel=SP, **ACCUMULATED),
]
# Slow: a model, or blocks that run again, that other rows have on another mesh.
REST = ("sp2_gpt2", "sp2_recomputed", "sp2_pp2_gpt2", "sp2_dp2")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The runs of the chosen tests: one launch a world size."""
    made = {2: wanted_cases(request, TWO_RANKS), 4: wanted_cases(request, FOUR_RANKS)}
    return run_all(made, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=slow_if(case.name, REST), id=case.name) for case in TWO_RANKS + FOUR_RANKS]
)
def test_parts_of_the_sequence_train_as_the_stock_trainer_does(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[case.name], runs[f"stock_{case.name}"])


def passes_main(rank: int, world_size: int, folder: str) -> list[int]:
    """Microbatches of each schedule that trains."""
    from hf_parallel import HFParallelCallback
    from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime

    case = Case("passes", parallel=SP_PP2, accumulation=2, steps=3)
    trainer = make_trainer(case, Path(folder), world_size, [])
    assert any(isinstance(callback, HFParallelCallback) for callback in trainer.callback_handler.callbacks)
    counts, run = [], PipelineRuntime.run

    def counted(self: Any, microbatches: Any, *args: Any, backward: bool, **options: Any) -> Any:
        counts.extend([len(microbatches)] if backward else [])
        return run(self, microbatches, *args, backward=backward, **options)

    PipelineRuntime.run = counted  # type: ignore[method-assign]
    trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    return counts


def test_the_batches_of_a_step_are_microbatches_of_one_schedule(tmp_path: Path) -> None:
    for counts in run_ranks(passes_main, 4, str(tmp_path), tmp_path=tmp_path, env=ENV):
        assert counts == [2 * SP_PP2["num_microbatches"]] * 3
