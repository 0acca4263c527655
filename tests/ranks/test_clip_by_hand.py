"""Loops of users that clip by a norm which they add up: with stages refused before the update it would spoil."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import user_loops
import user_steps
from rank_runner import run_ranks
from user_loops import Loop

from hf_parallel.errors import UnsupportedError


pytestmark = pytest.mark.long


def clip_by_hand(rank: int, world_size: int, wanted: str) -> tuple[str, bool]:
    """A raw loop that clips by a norm that it adds up, or halves all gradients after a look at them."""
    loop = Loop("pp2")
    loop.prepare()
    loop.backward(0)
    gradients = [p.grad for p in loop.model.parameters()]
    total = sum(float(gradient.norm()) ** 2 for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(0.05 / total if wanted == "refused" else 0.5)
    before = user_loops.copied(loop.named())
    error = ""
    try:
        loop.step()
    except UnsupportedError as refused:
        error = str(refused)
    changed = any(not torch.equal(before[name], parameter) for name, parameter in loop.named().items())
    loop.result()
    return error, changed


def test_a_loop_that_clips_by_hand_is_refused_before_its_first_update(tmp_path: Path) -> None:
    for error, changed in run_ranks(clip_by_hand, 2, "refused", tmp_path=tmp_path, env=user_steps.ENV):
        assert "is not that of the model" in error
        assert not changed


def test_a_loop_that_looks_and_halves_is_not(tmp_path: Path) -> None:
    for error, changed in run_ranks(clip_by_hand, 2, "halved", tmp_path=tmp_path, env=user_steps.ENV):
        assert not error
        assert changed
