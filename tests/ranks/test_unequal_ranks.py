"""A pipeline cut for ranks of different speed and memory trains as one process does, and says how it was cut.

If these fail, `rank_speed` or `rank_memory_gb` changes the result, or changes nothing at all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from trainer_cases import ENV, Case, compare, run_cases


pytestmark = pytest.mark.timeout(300)

SPEED = {"pp_size": 2, "rank_speed": [1, 3]}
AUTO = {"pp_size": 2, "rank_speed": "auto", "rank_memory_gb": "auto"}
TWO_RANKS = [
    Case("speed", parallel=SPEED, steps=4),
    Case("auto", parallel=AUTO, steps=4, model="llama_tied", accumulation=2, variable_length=True),
]
ZERO_BUBBLE = Case("zbv", parallel={**SPEED, "schedule": "zbv_zero_bubble", "rank_memory_gb": [1, 1]}, steps=4)
FOUR_RANKS = [
    Case("dp2", parallel={**AUTO, "zero.stage": 1}, steps=4, model="llama_tied"),
    Case("tp2", parallel={**SPEED, "tp_size": 2, "rank_memory_gb": [1, 1]}, steps=4),
]


def check(cases: list[Case], world_size: int, folder: Path) -> None:
    found = run_cases(cases, world_size, folder / "mesh")
    references = run_cases([Case(**{**vars(case), "parallel": None}) for case in cases], 1, folder / "one")
    for case in cases:
        compare(found[case.name], references[case.name])


def test_unequal_stages_train_as_one_process(tmp_path: Path) -> None:
    check(TWO_RANKS, 2, tmp_path)


@pytest.mark.long
def test_unequal_stages_of_a_zero_bubble_schedule_train_as_one_process(tmp_path: Path) -> None:
    check([ZERO_BUBBLE], 2, tmp_path)


@pytest.mark.long
def test_unequal_stages_of_replicas_and_shards_train_as_one_process(tmp_path: Path) -> None:
    check(FOUR_RANKS, 4, tmp_path)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def cut_main(rank: int, world_size: int, parallel: dict[str, Any]) -> tuple[list[int], list[str], str]:
    """Bounds of the cut, what was said, and the error."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    lines = Lines()
    logging.getLogger("hf_parallel").addHandler(lines)
    logging.getLogger("hf_parallel").setLevel(logging.DEBUG)
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **parallel))
    try:
        model = accelerator.prepare(tiny.llama(layers=8))
    except Exception as error:
        return [], lines.found, f"{type(error).__name__}: {error}"
    held = {int(name.split(".")[2]) for name, p in model.named_parameters() if ".layers." in name and p.numel()}
    loss = model(**tiny.collate(tiny.rows(4))).loss
    assert torch.isfinite(loss)
    return sorted(held), lines.found, ""


def cuts_main(rank: int, world_size: int, settings: list[dict[str, Any]]) -> list[tuple[list[int], list[str], str]]:
    from accelerate.state import AcceleratorState

    found = []
    for each in settings:
        AcceleratorState._reset_state()  # one process stands for many runs
        found.append(cut_main(rank, world_size, {"pp_size": 2, **each}))
    return found


def test_the_slow_and_the_small_rank_hold_less(tmp_path: Path) -> None:
    whole = sum(p.numel() for p in tiny.llama(layers=8).parameters()) * 16 / 1e9
    settings = [{}, {"rank_speed": [1, 3]}, {"rank_memory_gb": [9 * whole, 0.4 * whole]}]
    of_ranks = run_ranks(cuts_main, 2, settings, tmp_path=tmp_path, env=ENV)
    assert not any(error for found in of_ranks for _, _, error in found), of_ranks
    plain, slow, small = ([len(held) for held, _, _ in cuts] for cuts in zip(*of_ranks, strict=True))
    said = [lines for _, lines, _ in of_ranks[0]]
    assert slow[0] < plain[0]
    assert sum(slow) == sum(plain) == 8
    assert any("speed of the pipeline's ranks: 0.33, 1.00" in line for line in said[1])
    assert small[1] < plain[1]
    assert any("memory of the pipeline's ranks" in line for line in said[2])


def test_a_model_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    settings = {"pp_size": 2, "rank_memory_gb": [1e-4, 1e-4]}
    for _, _, error in run_ranks(cut_main, 2, settings, tmp_path=tmp_path, env=ENV):
        assert error.startswith("PlanError: pipeline.rank_memory_gb=[0.0001, 0.0001] is not enough"), error
        assert "Raise pipeline.rank_memory_gb" in error
