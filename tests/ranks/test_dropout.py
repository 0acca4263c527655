"""With dropout a pipeline run can be repeated and resumed, and does not depend on how many stages there are.

If these fail, two runs with one seed differ, a resumed run draws other masks, or adding a GPU changes the experiment.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from thinning import rest_runs
from trainer_cases import NO_NOISE, Case, compare, run_cases


pytestmark = pytest.mark.long


BASE = Case(
    "pp2",
    model="gpt2_dropout",
    parallel={"pp_size": 2, "num_microbatches": 4},
    accumulation=2,
    steps=3,
    variable_length=True,
    save=True,
    arguments=NO_NOISE,
)


def variant(name: str, **settings: Any) -> Case:
    return dataclasses.replace(BASE, name=name, parallel={**(BASE.parallel or {}), **settings}, save=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dropout")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, folder: Path) -> dict[str, dict[str, Any]]:
    checkpointed = dataclasses.replace(
        variant("pp2_checkpointing"), arguments={**NO_NOISE, "gradient_checkpointing": True}
    )
    without = dataclasses.replace(variant("without"), model="gpt2")
    grouped = variant("pp2_groups", activation_checkpointing={"every": 2})
    two = [BASE, variant("again"), variant("pp2_v", schedule="zbv_zero_bubble"), grouped, without]
    two += [checkpointed] if rest_runs(request) else []
    found = run_cases(two, 2, folder)
    return found | run_cases([variant("pp4", pp_size=4)], 4, folder)


def test_the_same_seed_gives_the_same_run_bit_for_bit(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["again"]["history"] == runs["pp2"]["history"]
    losses = [entry["loss"] for entry in runs["pp2"]["history"] if "loss" in entry]
    plain = [entry["loss"] for entry in runs["without"]["history"] if "loss" in entry]
    assert all(abs(here - there) > 1e-4 for here, there in zip(losses, plain, strict=True))


# Slow: blocks are run again in another row too.
@pytest.mark.parametrize(
    "name", ["pp4", "pp2_v", pytest.param("pp2_checkpointing", marks=pytest.mark.slow), "pp2_groups"]
)
def test_masks_do_not_depend_on_stages_schedule_or_recomputation(name: str, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[name], runs["pp2"])


def test_a_resumed_run_draws_the_masks_of_the_unbroken_one(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    resumed = run_cases([dataclasses.replace(BASE, resume_at=2)], 2, folder)["pp2"]
    assert resumed["history"] == runs["pp2"]["history"]
