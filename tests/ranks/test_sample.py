"""A model that needs more than text is planned with a batch of its own, and trains as in one process.

If these fail, multimodal models cannot be cut at all, or are cut for inputs they will never see.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rank_runner import run_ranks
from zoo.models import build, quiet
from zoo.ranks import TOLERANCE, ranks_main

from hf_parallel import HFParallelPlugin
from hf_parallel.batches import split_rows
from hf_parallel.errors import PlanError, UnsupportedError


@pytest.mark.parametrize("name", ["git", "mllama@cross", "musicgen"])
def test_a_model_planned_with_its_own_inputs_trains_as_in_one_process(name: str, tmp_path: Path) -> None:
    for found in run_ranks(ranks_main, 2, name, tmp_path=tmp_path):
        assert max(found.values()) <= TOLERANCE


def refused_rank(rank: int, world_size: int) -> str:
    with quiet():
        accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, pp_size=2))
        try:
            accelerator.prepare(build("git"))
        except PlanError as error:
            return str(error)
        finally:
            accelerator.hf_parallel.watchdog.stop()
    return ""


def test_without_a_sample_it_is_refused_with_the_way_out(tmp_path: Path) -> None:
    first, second = run_ranks(refused_rank, 2, tmp_path=tmp_path)
    assert first == second
    assert "cannot plan GitForCausalLM: its forward fails on a made-up batch of text" in first
    assert "HFParallelCallback(sample=" in first


def test_rows_that_are_not_those_of_the_labels_are_not_cut() -> None:
    batch = {"input_ids": torch.zeros(8, 5), "labels": torch.zeros(2, 5, 4)}
    assert len(split_rows(batch, 1)) == 1
    with pytest.raises(UnsupportedError, match=r"inputs of this batch have 8 rows and its labels 2.*to 1"):
        split_rows(batch, 2)
