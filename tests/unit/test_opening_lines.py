"""What the first lines of a run say about its batches."""

from __future__ import annotations

import pytest

from hf_parallel import HFParallelConfig
from hf_parallel.engine.opening import batch_line


PP2 = HFParallelConfig(pp_size=2, pipeline={"num_microbatches": 4})


def test_rows_that_are_fewer_than_microbatches_are_told() -> None:
    said = batch_line(1, 1, 1, PP2)
    assert said.startswith("an optimizer step has 1 row (1 a batch x 1 batch x dp 1); ")
    assert "these are 1 microbatch of a replica where num_microbatches is 4" in said
    assert "raise per_device_train_batch_size to 4" in said


@pytest.mark.parametrize(("rows", "steps"), [(4, 1), (1, 4), (8, 1)])
def test_rows_that_are_enough_need_no_words(rows: int, steps: int) -> None:
    assert "microbatch" not in batch_line(rows, steps, 2, PP2)
    assert "microbatch" not in batch_line(rows, steps, 2, HFParallelConfig(tp_size=2))
