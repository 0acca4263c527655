"""Parameters in parts (`fully_shard`) train exactly as one process does, hold what they say, and fit other checkpoints.

If these fail, sharded runs drift from whole ones: gradients averaged twice, an optimizer left on parameters that nobody
computes with, a stale copy of a gathered parameter, or optimizer state lost on resume.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from thinning import rest_runs, slow_if
from trainer_cases import NO_NOISE, Case, compare, run_cases, stock


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PLAIN = Case("plain", model="llama_tied", steps=3, variable_length=True, arguments=NO_NOISE)
ACCUMULATED = dataclasses.replace(PLAIN, name="accumulated", accumulation=3)
GPT2 = Case("gpt2", model="gpt2", steps=3, accumulation=2, arguments=NO_NOISE)
USER = Case("user", steps=3, user_optimizer=True, clip=0.0)
EVALUATED = Case(
    "evaluated", model="llama_tied", steps=4, evaluate=True, metrics=True, eval_count=40, arguments=NO_NOISE
)
UNEVEN = dataclasses.replace(PLAIN, name="uneven", model="uneven")
EXPERTS = Case("experts", model="mixtral", steps=3, arguments=NO_NOISE)
SMOOTHED = Case("smoothed", steps=3, arguments={**NO_NOISE, "label_smoothing_factor": 0.1})
CHECKPOINTED = dataclasses.replace(PLAIN, name="checkpointed", arguments={**NO_NOISE, "gradient_checkpointing": True})
ONE_BLOCK = dataclasses.replace(PLAIN, name="one_block", model="llama_1")  # no stack: the model is gathered at once
REFERENCES = (ONE_BLOCK, PLAIN, ACCUMULATED, GPT2, USER, EVALUATED, UNEVEN, SMOOTHED, CHECKPOINTED)
# Averages over replicas count the balance loss of its router once each, whatever shares the parameters out.
EXPERTS_WHOLE = dataclasses.replace(EXPERTS, name="stock_experts", parallel={"tp_size": 2})
OFFLOAD = {"offload_param": "cpu", "offload_optimizer": "cpu"}


def sharded(
    base: Case, name: str, stage: int, more: dict[str, Any] | None = None, **parallel: Any
) -> tuple[Case, Case]:
    partition = {"stage": stage, **({"engine": "fsdp2"} if stage == 2 else {}), **(more or {})}
    return dataclasses.replace(base, name=name, parallel={"zero": partition, **parallel}), base


TWO_RANKS = [
    sharded(PLAIN, "dp2_stage3", 3),
    sharded(ACCUMULATED, "dp2_stage3_accumulated", 3),
    sharded(ACCUMULATED, "dp2_stage2_accumulated", 2),
    sharded(GPT2, "dp2_stage3_gpt2", 3),
    sharded(USER, "dp2_stage3_user_optimizer", 3),
    sharded(USER, "dp2_stage2_user_optimizer", 2),
    sharded(ACCUMULATED, "dp2_stage3_offloaded", 3, OFFLOAD),
    sharded(EVALUATED, "dp2_stage3_evaluated", 3),
    sharded(EVALUATED, "dp2_stage2_evaluated", 2),
    sharded(ACCUMULATED, "dp2_stage3_selective", 3, activation_checkpointing={"every": 1, "mode": "selective"}),
    sharded(
        ACCUMULATED, "dp2_stage3_recomputed_by_3", 3, OFFLOAD, activation_checkpointing={"every": 3, "offload": True}
    ),
    sharded(GPT2, "dp2_stage2_recomputed_by_2", 2, activation_checkpointing={"every": 2, "offload": True}),
    sharded(PLAIN, "dp2_stage3_alternate", 3, activation_checkpointing={"every": 2, "mode": "alternate"}),
    sharded(CHECKPOINTED, "dp2_stage3_gradient_checkpointing", 3),
    sharded(ONE_BLOCK, "dp2_stage3_one_block", 3),
    sharded(SMOOTHED, "dp2_stage3_label_smoothing", 3),
]
FOUR_RANKS = [
    sharded(ACCUMULATED, "dp4_stage3", 3),
    sharded(ACCUMULATED, "dp4_hybrid_stage3", 3, {"dp_shard_size": 2}),
    sharded(GPT2, "dp4_hybrid_stage2", 2, {"dp_shard_size": 2}),
    sharded(ACCUMULATED, "tp2_dp2_stage3", 3, tp_size=2),
    sharded(GPT2, "tp2_dp2_stage2", 2, tp_size=2),
    sharded(PLAIN, "tp2_dp2_stage3_offloaded", 3, OFFLOAD, tp_size=2),
    sharded(UNEVEN, "tp2_dp2_stage3_uneven", 3, tp_size=2),
    sharded(EXPERTS, "tp2_dp2_stage3_experts", 3, tp_size=2),
    sharded(ACCUMULATED, "sp2_dp2_stage3", 3, tp_size=2, sequence_parallel=True),
    sharded(GPT2, "sp2_dp2_stage3_gpt2", 3, tp_size=2, sequence_parallel=True),
]
# Slow: settings that other rows have on two ranks or on four, with the other engine or the other model.
REST = (
    "dp2_stage2_user_optimizer",
    "dp2_stage2_evaluated",
    "dp4_stage3",
    "tp2_dp2_stage3_offloaded",
    "tp2_dp2_stage3",
    "sp2_dp2_stage3_gpt2",
)
ROWS = [pytest.param(case, base, marks=slow_if(case.name, REST)) for case, base in TWO_RANKS + FOUR_RANKS]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with_rest = rest_runs(request)
    two, four = ([case for case, _ in rows if with_rest or case.name not in REST] for rows in (TWO_RANKS, FOUR_RANKS))
    for world_size, cases in ((1, list(map(stock, REFERENCES))), (2, two), (4, [EXPERTS_WHOLE, *four])):
        found |= run_cases(cases, world_size, tmp_path_factory.mktemp(f"world{world_size}"))
    return found


@pytest.mark.parametrize(("case", "base"), ROWS, ids=lambda value: value.name)
def test_parameters_in_parts_train_as_one_process_does(
    case: Case, base: Case, runs: dict[str, dict[str, Any]]
) -> None:
    compare(runs[case.name], runs[f"stock_{base.name}"])


NATIVE: dict[str, Any] = {"stage": 2}
FSDP: dict[str, Any] = {"stage": 3}
NONE: dict[str, Any] = {"stage": 0}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, FSDP), (4, {**FSDP, "dp_shard_size": 2})),
        ((4, FSDP), (2, NONE)),
        ((2, NONE), (2, FSDP)),
        ((2, FSDP), (2, NATIVE)),
        ((4, NATIVE), (2, {**FSDP, **OFFLOAD})),
    ],
    ids=["more_replicas", "to_none", "from_none", "to_native", "from_native"],
)
def test_a_checkpoint_resumes_on_other_engines_and_replicas(
    saved: tuple[int, dict[str, Any]],
    resumed: tuple[int, dict[str, Any]],
    tmp_path: Path,
    runs: dict[str, dict[str, Any]],
) -> None:
    run = dataclasses.replace(PLAIN, name="run")  # saved at its second step of three
    run_cases([dataclasses.replace(run, parallel={"zero": saved[1]}, save=True)], saved[0], tmp_path)
    (tmp_path / "run" / "parameters.safetensors").unlink()
    again = dataclasses.replace(run, parallel={"zero": resumed[1]}, resume_at=2)
    compare(run_cases([again], resumed[0], tmp_path)["run"], runs["stock_plain"])
