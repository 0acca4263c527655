"""Sums of powers of gradients that are right to about 1e-8, at the price of one pass over them.

On a CPU torch sums the squares of a tensor in fp32, one after the other: 2.5e7 small numbers lose 1e-3 of their norm.
Here rows of a few hundred elements are summed in fp32 and the rows in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_parallel.compat.torch_tools import norms_of


ROW = 256  # elements that are summed in fp32
SMALL = 4096  # elements up to which torch's own norm is right to 1e-7
PIECE = 2**18  # elements of a half-precision tensor, or of one with gaps, that are copied at once
INFINITE = float("inf")


def power_sum(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of the magnitudes to the power of `norm_type`, or the largest if that is infinite: 0-d, fp64, on `device`.

    Args:
        tensors: Tensors to measure; half precision in fp32, because its squares overflow or vanish.
        norm_type: Above 0.
        device: Device of the sum.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    norms = [norm.to(device).double() for norm in _norms(tensors, norm_type)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    flat = torch.cat([norm.reshape(-1) for norm in norms])
    return flat.max() if norm_type == INFINITE else flat.pow(norm_type).sum()


def _norms(tensors: Sequence[Tensor], norm_type: float) -> Iterator[Tensor]:
    """Norms of parts that make up all tensors."""
    at_once: list[Tensor] = []
    for tensor in tensors:
        # A GPU sums in a tree of blocks, and a largest element is exact.
        if tensor.numel() <= SMALL or norm_type == INFINITE or tensor.device.type != "cpu":
            at_once.append(tensor)
        else:
            yield from _row_norms(tensor, norm_type)
    half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in at_once)
    if at_once:
        yield from norms_of(at_once, norm_type, torch.float32 if half else None)


def _row_norms(tensor: Tensor, norm_type: float) -> Iterator[Tensor]:
    for piece in _pieces(tensor):
        body = piece.numel() // ROW * ROW
        yield torch.linalg.vector_norm(piece[:body].view(-1, ROW), norm_type, dim=1)
        if body < piece.numel():
            yield torch.linalg.vector_norm(piece[body:], norm_type)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as flat ones in fp32 or more; what must be copied for that is copied piece by piece."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        if tensor.dtype.itemsize >= 4:
            yield flat
            return
        for piece in flat.split(PIECE):
            yield piece.float()
        return
    inside = tensor[0].numel() if tensor.ndim else 1
    for rows in tensor.split(max(1, PIECE // max(inside, 1))):
        if rows.numel() > PIECE and rows.ndim > 1:
            yield from _pieces(rows[0])
        else:
            yield rows.reshape(-1).to(torch.promote_types(rows.dtype, torch.float32))
