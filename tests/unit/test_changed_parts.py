"""If these fail, a norm of one rank's shards clips gradients without a word, or our own changes are refused."""

from __future__ import annotations

import pytest
import torch

from hf_parallel.engine.gradients.changed_parts import ChangedParts
from hf_parallel.errors import UnsupportedError


def watched() -> tuple[torch.Tensor, ChangedParts]:
    gradient = torch.arange(1.0, 5.0)
    return gradient, ChangedParts(lambda: gradient.double().square().sum(), 2)


def test_a_change_between_reduction_and_step_is_refused_at_that_step() -> None:
    gradient, parts = watched()
    parts.remember()
    gradient.mul_(0.5)
    with pytest.raises(UnsupportedError, match=r"gradients were changed .*tp_size=2"):
        parts.refuse_changes()
    parts.refuse_changes()  # of a step without a reduction nothing is known


def test_our_own_changes_and_values_that_are_no_numbers_are_none() -> None:
    gradient, parts = watched()
    parts.remember_again()
    parts.refuse_changes()
    parts.remember()
    gradient.mul_(0.5)
    parts.remember_again()
    parts.refuse_changes()
    gradient.fill_(float("nan"))
    parts.remember()
    gradient.mul_(2)
    parts.refuse_changes()
