"""Norms of long gradients, next to the same in fp64: torch's own loses 1e-3 on a CPU."""

from __future__ import annotations

import pytest
import torch

from hf_parallel.data_parallel.norms import PIECE, power_sum


CPU = torch.device("cpu")


def gradients() -> list[torch.Tensor]:
    """An embedding of 49152 rows, its transpose, columns of it, one row that is long, small ones, an empty one."""
    generator = torch.Generator().manual_seed(0)
    table = 1e-3 * torch.randn(49152, 160, generator=generator)
    row = torch.randn(2 * PIECE + 77, generator=generator)
    return [table, table.t(), table[:, 3:90], row[None, ::2], row[5:], torch.tensor(0.5), torch.zeros(0), row[:300]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_long_gradients_are_measured_as_in_fp64(norm_type: float, dtype: torch.dtype) -> None:
    tensors = [tensor.to(dtype) for tensor in gradients()]
    each = [torch.linalg.vector_norm(t.double().reshape(-1), norm_type) for t in tensors if t.numel()]
    expected = torch.linalg.vector_norm(torch.stack(each), norm_type)
    total = power_sum(tensors, norm_type, CPU)
    found = total if norm_type == float("inf") else total.pow(1 / norm_type)
    assert float(found) == pytest.approx(float(expected), rel=2e-7)


def test_nothing_has_norm_zero_and_what_is_not_finite_shows() -> None:
    assert float(power_sum([], 2.0, CPU)) == 0.0
    bad = torch.zeros(10_000)
    bad[7777] = float("nan")
    assert power_sum([bad], 2.0, CPU).isnan()
    bad[7777] = float("inf")
    assert power_sum([bad], 2.0, CPU).isinf()
