"""If these fail, gradients of an accumulation window are multiplied with the factor of one of its losses."""

from __future__ import annotations

import pytest
import torch

from hf_parallel.engine.run.window import WindowFactors
from hf_parallel.errors import UnsupportedError


def taken(*values: float) -> float:
    factors = WindowFactors()
    for value in values:
        factors.add(torch.tensor(value))
    return factors.take()


def test_equal_factors_are_one() -> None:
    assert taken(0.25, 0.25, 0.25) == 0.25


@pytest.mark.parametrize("values", [(0.25, 0.5), (1.0, float("nan")), (0.0, 1e-9)])
def test_different_factors_are_refused_with_their_values(values: tuple[float, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"scaled differently: \["):
        taken(*values)


def test_a_window_leaves_nothing_to_the_next() -> None:
    factors = WindowFactors()
    factors.add(torch.tensor(1.0))
    factors.take()
    factors.add(torch.tensor(2.0))
    assert factors.take() == 2.0
