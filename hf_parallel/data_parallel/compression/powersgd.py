"""PowerSGD: gradient matrices as products of two thin ones, summed as such.

Written anew because torch's hook starts its second and third collective from callbacks, in an order that differs
between ranks on gloo, keeps errors by bucket number, and lets one inf into all later gradients.

Source: Vogels et al. 2019 (arXiv:1905.13727), algorithms 1 and 2, with the warm start of section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.compat.private_collectives import Pending
from hf_parallel.data_parallel.compression.exchange import Meter
from hf_parallel.data_parallel.compression.feedback import Layout


class PowerSGD:
    """Approximate sums of matrices over a group.

    Args:
        rank: Columns of the thin matrices, 1 or more.
        group: The ranks.
        meter: Counts.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, meter: Meter) -> None:
        self.rank, self.group, self.meter = rank, group, meter
        self._right: dict[str, Tensor] = {}

    @staticmethod
    def saves(shape: Sequence[int], rank: int) -> bool:
        """Whether a gradient of this shape is sent in half the bytes or less."""
        rows, columns = matrix_shape(shape)
        return 2 * rank * (rows + columns) <= rows * columns

    def total(self, flat: Tensor, bucket: Layout) -> Generator[Pending | None, None, Tensor]:
        """Steps to the approximate sum of the ranks' flat buffers, f32[n], whose slots are all matrices.

        The thin matrices of this step begin the next. A sum that is not finite leaves them as they were.
        """
        slots = list(zip(bucket.names, bucket.offsets, bucket.shapes, strict=True))
        matrices = [flat[start : start + shape.numel()].view(matrix_shape(shape)) for _, start, shape in slots]
        right = [self._start(name, matrix) for (name, _, _), matrix in zip(slots, matrices, strict=True)]
        left = [matrix @ thin for matrix, thin in zip(matrices, right, strict=True)]
        left = yield from self._sum(left)
        left = orthonormal(left)
        fresh = [matrix.t() @ thin for matrix, thin in zip(matrices, left, strict=True)]
        fresh = yield from self._sum(fresh)
        total = torch.zeros_like(flat)
        for (name, start, shape), thin, other in zip(slots, left, fresh, strict=True):
            torch.mm(thin, other.t(), out=total[start : start + shape.numel()].view(matrix_shape(shape)))
            kept = self._right[name]
            self._right[name] = torch.where(torch.isfinite(other).all(), other, kept)
        return total

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """The thin matrix of the last step; at first random numbers that depend on the name alone."""
        known = self._right.get(name)
        if known is None:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            generator = torch.Generator().manual_seed(seed)
            known = torch.randn(matrix.shape[1], self.rank, generator=generator)
        known = self._right[name] = known.to(matrix.device)
        return known

    def _sum(self, parts: list[Tensor]) -> Generator[Pending | None, None, list[Tensor]]:
        flat = torch.cat([part.reshape(-1) for part in parts])
        ranks = self.group.size()
        self.meter.wire_bytes += 2 * (ranks - 1) * flat.nbytes // ranks
        yield dist.all_reduce(flat, group=self.group, async_op=True)
        sizes = [part.numel() for part in parts]
        return [piece.view_as(part) for piece, part in zip(flat.split(sizes), parts, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """Parameter name -> the thin matrix that the next step begins with."""
        return dict(self._right)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._right = dict(state)


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns that span those of each matrix f32[rows, rank], by QR.

    Matrices of one shape go into one call: on a GPU one QR of a thin matrix takes about as long as a batch of them.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    found = list(matrices)
    for indices in by_shape.values():
        batch = torch.linalg.qr(torch.stack([matrices[index] for index in indices]))[0]
        for index, columns in zip(indices, batch, strict=True):
            found[index] = columns
    return found


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient seen as a matrix: the first dim against the others."""
    rows = int(shape[0]) if len(shape) > 1 else 1
    columns = 1
    for size in shape[1:] if len(shape) > 1 else shape:
        columns *= int(size)
    return rows, columns
