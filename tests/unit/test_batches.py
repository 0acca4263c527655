"""Batches: rows are cut without loss, targets counted as the loss counts them, and equal batches have equal digests."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_parallel.batches import BatchCheck, count_targets, digest, num_rows, split_rows
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape


@given(st.integers(1, 20), st.integers(1, 12))
@settings(deadline=None)
def test_microbatches_hold_every_row_once_in_order_and_evenly(rows: int, parts: int) -> None:
    batch = {"input_ids": torch.arange(rows * 3).reshape(rows, 3), "labels": torch.arange(rows * 3).reshape(rows, 3)}
    cut = split_rows(batch, parts)
    assert len(cut) == min(rows, parts)
    sizes = [num_rows(microbatch) for microbatch in cut]
    assert max(sizes) - min(sizes) <= 1
    for name, tensor in batch.items():
        assert torch.equal(torch.cat([microbatch[name] for microbatch in cut]), tensor)


def test_what_has_no_rows_goes_to_every_microbatch() -> None:
    positions, scalar = torch.arange(5)[None], torch.tensor(2.0)
    batch = {"inputs_embeds": torch.ones(4, 5, 2), "position_ids": positions, "scale": scalar, "use_cache": False}
    for microbatch in split_rows(batch, 2):
        assert microbatch["position_ids"] is positions
        assert microbatch["scale"] is scalar
        assert microbatch["use_cache"] is False
        assert num_rows(microbatch) == 2


def test_positions_in_time_height_and_width_are_cut_by_their_second_dim() -> None:
    """Three rows, too: the first dim is no row of the batch then either."""
    positions = torch.arange(3 * 3 * 5).reshape(3, 3, 5)
    batch = {"input_ids": torch.ones(3, 5), "position_ids": positions}
    cut = split_rows(batch, 2)
    assert torch.equal(torch.cat([microbatch["position_ids"] for microbatch in cut], 1), positions)
    assert [num_rows(microbatch) for microbatch in cut] == [2, 1]


def test_images_that_are_not_one_a_row_are_not_cut() -> None:
    batch = {"input_ids": torch.ones(4, 5), "pixel_values": torch.rand(6, 3, 8, 8)}
    assert len(split_rows(batch, 1)) == 1
    with pytest.raises(
        UnsupportedError, match=r"this batch have 4 rows and its pixel_values 6.*num_microbatches to 1"
    ):
        split_rows(batch, 2)
    masked = {"input_ids": torch.ones(4, 5), "attention_mask": torch.zeros(1, 1, 5, 5)}
    assert split_rows(masked, 2)[1]["attention_mask"] is masked["attention_mask"]


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inputs \['tokens'\]: none of input_ids, .*Name the token ids input_ids"):
        num_rows({"tokens": torch.ones(2, 3)})


def test_targets_are_counted_as_the_loss_counts_them() -> None:
    labels = torch.tensor([[5, -100, 7, 8], [-100, -100, 9, -100]])
    assert int(count_targets({"labels": labels}, shifted=True)) == 3
    assert int(count_targets({"labels": labels}, shifted=False)) == 4
    shifted = torch.tensor([[5, -100, -100, -100]])
    assert int(count_targets({"labels": labels, "shift_labels": shifted}, shifted=True)) == 1


def test_the_digest_sees_names_shapes_dtypes_values_and_order() -> None:
    ids = torch.arange(6)
    batches = [
        [{"input_ids": ids.reshape(2, 3)}],
        [{"input_ids": ids.reshape(3, 2)}],
        [{"labels": ids.reshape(2, 3)}],
        [{"input_ids": ids.reshape(2, 3).int()}],
        [{"input_ids": ids.flip(0).reshape(2, 3)}],
        [{"input_ids": ids.reshape(2, 3)}, {"input_ids": ids}],
        [{"input_ids": ids}, {"input_ids": ids.reshape(2, 3)}],
    ]
    assert len({digest(each) for each in batches}) == len(batches)
    again = {"extra": None, "input_ids": ids.reshape(3, 2).clone().reshape(2, 3)}
    assert digest([again]) == digest(batches[0])
    assert digest([{"b": ids, "a": ids + 1}]) == digest([{"a": ids + 1, "b": ids}])
    assert 0 <= digest(batches[0]) < 2**63


def test_scalars_and_every_kind_of_number_have_a_digest() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.int8):
        assert digest([{"x": torch.zeros(2, 2, dtype=dtype), "n": torch.zeros((), dtype=dtype)}]) >= 0
    assert digest([{"x": torch.zeros(0, 3)}]) >= 0


def test_one_rank_compares_with_nobody() -> None:
    check = BatchCheck(Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5)), steps=3)
    check.check([{"input_ids": torch.ones(1, 2)}])
