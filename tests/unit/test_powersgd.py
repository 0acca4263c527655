"""PowerSGD's QR: matrices of one shape share a call, and each gets the columns that it gets by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_parallel.data_parallel.compression.powersgd import orthonormal


def test_matrices_of_one_shape_are_made_orthonormal_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(12, 2), (7, 2), (12, 2), (12, 2), (7, 2), (1, 1)]
    matrices = [torch.randn(size, generator=generator) for size in sizes]
    alone = [torch.linalg.qr(matrix)[0] for matrix in matrices]
    shapes, stock = [], torch.linalg.qr

    def counted(matrix: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(matrix.shape))
        return stock(matrix)

    monkeypatch.setattr(torch.linalg, "qr", counted)
    for found, expected in zip(orthonormal(matrices), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert shapes == [(3, 12, 2), (2, 7, 2), (1, 1, 1)]
    assert orthonormal([]) == []
