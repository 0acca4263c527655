"""Every schedule trains every kind of model as the stock Trainer does on one process.

If a row fails, a schedule that is faster on paper trains something else: a weight gradient lost or counted twice, a
payload handed to the wrong stage, a gradient reduced before it was complete.

A model with tied embeddings meets every schedule on two ranks, the others those that place stages or split backwards in
a way of their own (`MATRIX`); the schedules that split backwards meet meshes of four ranks
(`MESHES`); losses, evaluation, compiled blocks and checkpointing meet one schedule of each placement (`EXTRA`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import NO_NOISE, Case, compare, run_cases, wanted_cases

from hf_parallel.pipeline_parallel.schedule.actions import format_schedule
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.settings.schedule_names import STAGES_PER_RANK


# All runs happen in the set-up of the first test.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


# Tied embeddings; Conv1D layers; a router's auxiliary loss; shared key-value states and per-layer embeddings; a scan.
KINDS = ("llama_tied", "gpt2", "mixtral", "gemma3n", "mamba")
SCHEDULES = (*STAGES_PER_RANK, "csv")


def case_of(schedule: str, model: str) -> Case:
    """Two ranks with two stages each where the schedule has them; six microbatches, their rows uneven."""
    # A router's loss is no sum over rows: its microbatches are whole batches, as they are in one process.
    cut = {"num_microbatches": 1} if model == "mixtral" else {"num_microbatches": 3}
    windows = {"accumulation": 4, "batch": 4} if model == "mixtral" else {"accumulation": 2, "batch": 8}
    parallel = {"pp_size": 2, "schedule": schedule, **cut}
    return Case(
        f"{schedule}_{model}",
        model=model,
        parallel=parallel,
        steps=3,
        variable_length=True,
        arguments=NO_NOISE,
        **windows,
    )


ALIKE = ("naive", "gpipe", "csv")  # what 1F1B and ZB-V do, in another order
MATRIX = [
    case_of(schedule, model) for model in KINDS for schedule in SCHEDULES if model == KINDS[0] or schedule not in ALIKE
]
# Every model meets half of them, and every schedule half of the models; the rest of the product is slow.
REST = [case.name for index, case in enumerate(MATRIX) if case.model != KINDS[0] and index % 2]
# So are, of the schedules that split backwards, those that others show on four stages, and on replicas.
REST += ["pp4_interleaved_zero_bubble", "pp4_dualpipev", "pp2_dp2_zbv_zero_bubble"]
SPLITTING = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
MESHES = [
    *[
        Case(f"pp4_{name}", model="llama_8", parallel={"pp_size": 4, "schedule": name, "num_microbatches": 8}, steps=3)
        for name in ("interleaved_1f1b", *SPLITTING)
    ],
    *[
        Case(
            f"pp2_dp2_{name}",
            model="llama_tied",
            parallel={"pp_size": 2, "schedule": name, "num_microbatches": 2},
            accumulation=2,
            variable_length=True,
            steps=3,
        )
        for name in SPLITTING
    ],
    Case(
        "pp2_tp2_zbv",
        model="llama_tied",
        parallel={"pp_size": 2, "tp_size": 2, "schedule": "zbv_zero_bubble", "num_microbatches": 4},
        evaluate=True,
        metrics=True,
        steps=3,
    ),
]
EXTRA = [
    Case("v_split_mode", parallel={"pp_size": 2, "schedule": "dualpipev"}, loss="subclass", steps=3),
    Case("v_eval", parallel={"pp_size": 2, "schedule": "zbv_zero_bubble"}, evaluate=True, metrics=True, steps=4),
    Case("compiled", parallel={"pp_size": 2, "compile_blocks": "aot_eager"}, variable_length=True, steps=3),
    Case("head_alone", parallel={"pp_size": 2, "split": [4, 0]}, variable_length=True, steps=3),
    Case(
        "v_checkpointing",
        model="llama_tied",
        parallel={"pp_size": 2, "schedule": "zbv_zero_bubble"},
        arguments={"gradient_checkpointing": True},
        steps=3,
    ),
]


EXTRA += [  # the stages of a rank of 6 blocks: groups of two, and one block in two
    Case(
        f"{mode}_{schedule}_{model}",
        model=model,
        parallel={"pp_size": 2, "schedule": schedule, "activation_checkpointing": {"every": 2, "mode": mode}},
        variable_length=True,
        arguments=NO_NOISE,
        steps=3,
    )
    for mode, schedule, model in [
        ("block", "1f1b", "gpt2"),
        ("alternate", "1f1b", "llama_tied"),
        ("block", "zbv_zero_bubble", "llama_8"),
        ("block", "interleaved_1f1b", "llama_8"),
        ("block", "1f1b", "gemma3n"),
        ("alternate", "dualpipev", "gemma3n"),
    ]
]
SELECTIVE = {"every": 2, "mode": "selective"}
EXTRA += [
    Case("block_tp2", parallel={"tp_size": 2, "activation_checkpointing": {"every": 2, "offload": True}}, steps=3),
    Case("selective_tp2", parallel={"tp_size": 2, "activation_checkpointing": SELECTIVE}, steps=3),
    Case(
        "selective_zbv_zero_bubble",
        model="llama_8",
        parallel={
            "pp_size": 2,
            "schedule": "zbv_zero_bubble",
            "activation_checkpointing": {**SELECTIVE, "offload": True},
        },
        variable_length=True,
        arguments=NO_NOISE,
        steps=3,
    ),
]


def stock(case: Case) -> Case:
    settings = {"parallel": None, "name": f"stock_{case.name}"}
    return dataclasses.replace(case, **settings)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    own, meshes = wanted_cases(request, MATRIX + EXTRA), wanted_cases(request, MESHES)
    file = tmp_path_factory.mktemp("schedule") / "own.csv"
    file.write_text(format_schedule(build_schedule("zbv_zero_bubble", 2, 6)))
    found = run_cases([stock(case) for case in own + meshes], 1, tmp_path_factory.mktemp("world1"))
    found |= run_cases([with_file(case, file) for case in own], 2, tmp_path_factory.mktemp("world2"))
    return found | run_cases(meshes, 4, tmp_path_factory.mktemp("world4"))


def with_file(case: Case, file: Path) -> Case:
    if not case.name.startswith("csv_"):
        return case
    return dataclasses.replace(case, parallel={**(case.parallel or {}), "schedule_file": str(file)})


def marked(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow if case.name in REST else (), id=case.name)


@pytest.mark.parametrize("case", [marked(case) for case in MATRIX + MESHES + EXTRA])
def test_a_schedule_trains_as_the_stock_trainer_does(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[case.name], runs[f"stock_{case.name}"])
