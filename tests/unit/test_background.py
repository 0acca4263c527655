"""A save in the background works on a copy, and its error reaches the training thread."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_parallel.checkpoints.state.background import Background, Channels, on_host
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.errors import CheckpointError


def test_the_copy_does_not_follow_what_training_does() -> None:
    live = torch.arange(6.0).view(2, 3)
    (copy,) = on_host([Piece("w", (2, 6), (0, 3), live.t().t())])
    live.zero_()
    assert torch.equal(copy.data, torch.arange(6.0).view(2, 3))
    assert (copy.label, copy.shape, copy.offsets) == ("w", (2, 6), (0, 3))
    (strided,) = on_host([Piece("w", (3, 2), (0, 0), torch.arange(6.0).view(2, 3).t())])
    assert strided.data.is_contiguous()


def test_it_has_ended_when_its_work_has() -> None:
    gate = threading.Event()
    save = Background(lambda: (gate.wait(30), None)[1], Channels())
    assert not save.has_ended()
    gate.set()
    save.wait()
    assert save.has_ended()


def test_what_goes_wrong_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise CheckpointError("no space left")

    save = Background(fail, Channels())
    with pytest.raises(CheckpointError, match="no space left"):
        save.wait()
