"""A stock Trainer whose ranks share the sequence of each row trains as one process does.

If a row fails, setting `sp_size` changes what users train.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import NO_NOISE, Case, compare, run_cases


pytestmark = [pytest.mark.timeout(300)]

SP2: dict[str, Any] = {"sp_size": 2}
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 3}
VARIABLE: dict[str, Any] = {"steps": 4, "variable_length": True}  # some rows of odd length
TWO_RANKS = [
    Case("ulysses2", parallel=SP2, evaluate=True, metrics=True, accumulation=2, **VARIABLE),
]
TWO_RANKS_LONG = [
    Case("ulysses2_gpt2", model="gpt2", parallel=SP2, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_sliding", model="sliding", parallel=SP2, **VARIABLE),
    Case("ulysses2_odd_heads", model="uneven", parallel=SP2, **VARIABLE),
    Case("ulysses2_gpt_oss", model="gpt_oss", parallel=SP2, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_latent", model="deepseek_v3", parallel=SP2, **VARIABLE),
    Case("ulysses2_experts", model="mixtral_plain", parallel=SP2, **VARIABLE),
    Case("ulysses2_lora", model="llama_lora", parallel=SP2, **VARIABLE),
    Case("ulysses2_zero1", parallel={**SP2, "zero": {"stage": 1}}, **VARIABLE),
    Case("ulysses2_zero2", parallel={**SP2, "zero": {"stage": 2}}, accumulation=2, **VARIABLE),
    Case("ulysses2_recomputed", parallel={**SP2, "activation_checkpointing": {"every": 2}}, **VARIABLE),
    Case(
        "ulysses2_offloaded", parallel={**SP2, "activation_checkpointing": {"every": 1, "offload": True}}, **VARIABLE
    ),
    Case(
        "ulysses2_selective",
        parallel={**SP2, "activation_checkpointing": {"every": 2, "mode": "selective"}},
        **VARIABLE,
    ),
    Case("ulysses2_checkpointing", parallel=SP2, arguments={"gradient_checkpointing": True}, **VARIABLE),
    Case("ulysses2_own_loss", parallel=SP2, loss="func", **VARIABLE),
    Case("ulysses2_subclass", parallel=SP2, loss="subclass", **VARIABLE),
    Case("ulysses2_smoothing", parallel=SP2, arguments={"label_smoothing_factor": 0.1}, **VARIABLE),
    Case("ulysses2_saved", parallel={**SP2, "zero": {"stage": 1}}, save=True, **VARIABLE),
]
FOUR_RANKS = [
    Case("ulysses2_dp2", parallel=SP2, accumulation=2, evaluate=True, **VARIABLE),
    Case("ulysses2_dp2_zero1", model="llama_tied", parallel={**SP2, "zero": {"stage": 1}}, **VARIABLE),
    Case("ulysses2_dp2_zero2", parallel={**SP2, "zero": {"stage": 2}}, accumulation=2, **VARIABLE),
    Case("ulysses2_tp2", parallel={**SP2, "tp_size": 2}, evaluate=True, metrics=True, **VARIABLE),
    Case("ulysses2_tp2_qwen3", model="qwen3", parallel={**SP2, "tp_size": 2}, accumulation=2, **VARIABLE),
    Case("ulysses2_pp2", parallel={**SP2, **PP2}, evaluate=True, metrics=True, accumulation=2, **VARIABLE),
    Case("ulysses2_pp2_gpt2", model="gpt2", parallel={**SP2, **PP2}, arguments=NO_NOISE, **VARIABLE),
    Case(
        "ulysses2_pp2_zero_bubble",
        model="llama_tied",
        parallel={**SP2, **PP2, "schedule": "zbv_zero_bubble"},
        **VARIABLE,
    ),
    Case(
        "ulysses2_pp2_recomputed",
        parallel={**SP2, **PP2, "activation_checkpointing": {"every": 1}, "zero": {"stage": 1}},
        **VARIABLE,
    ),
    Case("ulysses2_pp2_own_loss", parallel={**SP2, **PP2}, loss="func", **VARIABLE),
    Case("ulysses4_repeated", parallel={"sp_size": 4}, **VARIABLE),  # two key-value heads
]


def stock(case: Case) -> Case:
    """The run it must equal: no callback, one process."""
    return dataclasses.replace(case, name=f"stock_{case.name}", parallel=None)


def run_all(made: dict[int, list[Case]], folder: Path) -> dict[str, dict[str, Any]]:
    """One launch a world size, and the stock runs."""
    found = run_cases([stock(case) for cases in made.values() for case in cases], 1, folder / "world1")
    for world_size, cases in made.items():
        found |= run_cases(cases, world_size, folder / f"world{world_size}")
    return found


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_all({2: TWO_RANKS}, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_all({2: TWO_RANKS_LONG, 4: FOUR_RANKS}, tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_parts_of_rows_train_as_the_stock_trainer_does(case: Case, short_runs: dict[str, dict[str, Any]]) -> None:
    compare(short_runs[case.name], short_runs[f"stock_{case.name}"])


@pytest.mark.long
@pytest.mark.parametrize("case", TWO_RANKS_LONG + FOUR_RANKS, ids=lambda case: case.name)
def test_parts_of_rows_train_so_with_all_else(case: Case, long_runs: dict[str, dict[str, Any]]) -> None:
    compare(long_runs[case.name], long_runs[f"stock_{case.name}"])
