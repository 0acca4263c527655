"""A stock Trainer whose ranks share the sequence of each row trains as one process does.

If a row fails, setting `sp_size` changes what users train.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from trainer_cases import Case, compare, run_cases


pytestmark = [pytest.mark.timeout(300)]

SP2: dict[str, Any] = {"sp_size": 2}
TWO_RANKS = [
    Case("ulysses2_llama", parallel=SP2, steps=4, variable_length=True, evaluate=True, metrics=True),
]


def stock(case: Case) -> Case:
    """The run it must equal: no callback, one process."""
    return dataclasses.replace(case, name=f"stock_{case.name}", parallel=None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All runs of this file: one launch a world size."""
    found: dict[str, dict[str, Any]] = {}
    for world_size, cases in ((1, [stock(case) for case in TWO_RANKS]), (2, TWO_RANKS)):
        found |= run_cases(cases, world_size, tmp_path_factory.mktemp(f"world{world_size}"))
    return found


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_parts_of_rows_train_as_the_stock_trainer_does(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[case.name], runs[f"stock_{case.name}"])
