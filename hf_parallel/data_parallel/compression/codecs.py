"""Codecs: a flat fp32 vector to bytes and back, with a fixed number of bytes for each block of elements.

Fixed sizes make every message of a bucket equally long on all ranks and in all steps: no sizes are exchanged. A value
that is not finite makes at least itself, and at most its block, nan or inf after decoding: it is never lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


SCALE_BYTES = 4  # one fp32 number a block
OF_ONE_SCALE = 2048  # elements of fp16


class GradientCompressor(ABC):
    """A lossy code of blocks.

    Attributes:
        block: Elements of a block, 1 or more.
        bytes_per_block: Bytes of its code.
    """

    block: int
    bytes_per_block: int

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Code u8[n / block * bytes_per_block] of f32[n]; n is a multiple of `block`."""

    @abstractmethod
    def decode(self, payload: Tensor) -> Tensor:
        """Decode `payload` to f32[n]: what the code has kept of the vector."""

    @property
    def ratio(self) -> float:
        """Bytes of fp32 over bytes of the code."""
        return 4 * self.block / self.bytes_per_block


class CastCompressor(GradientCompressor):
    """bf16 as it is, or fp16 times a power of two for each block, so that it neither overflows nor vanishes.

    Args:
        dtype: torch.bfloat16 or torch.float16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._scaled = dtype == torch.float16
        self.block = OF_ONE_SCALE if self._scaled else 1
        self.bytes_per_block = 2 * self.block + (1 if self._scaled else 0)

    def encode(self, x: Tensor) -> Tensor:
        """See the base class."""
        if not self._scaled:
            return x.to(self.dtype).view(torch.uint8)
        blocks = x.view(-1, self.block)
        # A power of two scales without rounding, and its exponent fits into a byte. Values up to 2^11 are well inside fp16.
        exponent = blocks.abs().amax(1, keepdim=True).log2_().floor_().sub_(10).clamp_(-126, 117).nan_to_num_(0.0)
        codes = (blocks * torch.exp2(-exponent)).to(self.dtype).view(torch.uint8)
        return torch.cat([exponent.to(torch.int8).view(torch.uint8), codes], 1).view(-1)

    def decode(self, payload: Tensor) -> Tensor:
        """See the base class."""
        if not self._scaled:
            return payload.view(self.dtype).float()
        rows = payload.view(-1, self.bytes_per_block)
        scale = torch.exp2(rows[:, :1].view(torch.int8).float())
        return _compact(rows[:, 1:]).view(self.dtype).float().mul_(scale).view(-1)


class BlockQuantizer(GradientCompressor):
    """Signed integers of 8 or 4 bits times a scale, the largest magnitude of the block.

    Args:
        bits: 8 or 4.
        block: Elements that share a scale, a multiple of 8.
    """

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block
        self._largest = 2 ** (bits - 1) - 1
        self.bytes_per_block = block * bits // 8 + SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        """See the base class."""
        blocks = x.view(-1, self.block)
        scale = blocks.abs().amax(1, keepdim=True).div_(self._largest)
        steps = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = (blocks / steps).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
        if self.bits == 8:
            return _with_scale(scale, codes.view(torch.uint8))
        nibbles = (codes + self._largest).view(torch.uint8)
        return _with_scale(scale, nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))

    def decode(self, payload: Tensor) -> Tensor:
        """See the base class."""
        scale, codes = _split_scale(payload, self.bytes_per_block)
        if self.bits == 8:
            return (codes.view(torch.int8).float() * scale).view(-1)
        values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).float()
        return values.sub_(self._largest).mul_(scale).view(-1)


class OneBitCompressor(GradientCompressor):
    """Signs times the mean magnitude of the block. Biased: it needs error feedback.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019 (arXiv:1901.09847).

    Args:
        block: Elements that share a magnitude, a multiple of 8.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.bytes_per_block = block // 8 + SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        """See the base class."""
        blocks = x.view(-1, self.block)
        bits = (blocks >= 0).view(len(blocks), self.block // 8, 8).to(torch.uint8)
        return _with_scale(blocks.abs().mean(1, keepdim=True), (bits * _powers(x.device)).sum(-1, dtype=torch.uint8))

    def decode(self, payload: Tensor) -> Tensor:
        """See the base class."""
        scale, codes = _split_scale(payload, self.bytes_per_block)
        signs = _signs(payload.device).index_select(0, codes.view(-1).int())
        return signs.view(len(codes), self.block).mul_(scale).view(-1)


class TopKCompressor(GradientCompressor):
    """The elements of largest magnitude in each block, with their places. Biased: it needs error feedback.

    Places are local to the block, of 1 or 2 bytes.

    Args:
        density: Share of the elements that is kept, above 0; at least one a block.
        block: Elements of a block, at most 65536.
        value_dtype: "bf16", or "int8" with a scale for each block.
    """

    def __init__(self, density: float, block: int, value_dtype: str = "bf16") -> None:
        self.block = block
        self.kept = max(1, round(density * block))
        self._integers = value_dtype == "int8"
        self._place = torch.uint8 if block <= 256 else torch.uint16
        values = self.kept * (1 if self._integers else 2) + (SCALE_BYTES if self._integers else 0)
        self.bytes_per_block = values + self.kept * self._place.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """See the base class."""
        blocks = x.view(-1, self.block)
        places = blocks.abs().topk(self.kept, dim=1, sorted=False).indices
        values = blocks.gather(1, places)
        indices = places.to(torch.int32).to(self._place).view(torch.uint8)
        if not self._integers:
            return torch.cat([values.to(torch.bfloat16).view(torch.uint8), indices], 1).view(-1)
        scale = values.abs().amax(1, keepdim=True).div_(127)
        codes = (values / torch.where(scale > 0, scale, torch.ones_like(scale))).round_().nan_to_num_(0.0, 0.0, 0.0)
        return _with_scale(scale, torch.cat([codes.to(torch.int8).view(torch.uint8), indices], 1))

    def decode(self, payload: Tensor) -> Tensor:
        """See the base class."""
        scale, codes = _split_scale(payload, self.bytes_per_block) if self._integers else (None, None)
        rows = payload.view(-1, self.bytes_per_block) if codes is None else codes
        width = self.kept if self._integers else 2 * self.kept
        raw = _compact(rows[:, :width])
        values = raw.view(torch.int8).float() * scale if scale is not None else raw.view(torch.bfloat16).float()
        places = _compact(rows[:, width:]).view(self._place).long()
        return values.new_zeros(len(rows), self.block).scatter_(1, places, values).view(-1)


def _with_scale(scale: Tensor, codes: Tensor) -> Tensor:
    return torch.cat([scale.contiguous().view(torch.uint8), codes], 1).view(-1)


def _split_scale(payload: Tensor, bytes_per_block: int) -> tuple[Tensor, Tensor]:
    """Scales f32[blocks 1] and codes u8[blocks bytes_per_block - 4]."""
    rows = payload.view(-1, bytes_per_block)
    return _compact(rows[:, :SCALE_BYTES]).view(torch.float32), _compact(rows[:, SCALE_BYTES:])


def _compact(rows: Tensor) -> Tensor:
    """A copy whose bytes may be viewed as wider numbers; a single row is contiguous to torch whatever its stride is."""
    return rows.clone(memory_format=torch.contiguous_format)


def _signs(device: torch.device) -> Tensor:
    """The eight signs that each byte stands for, f32[256 8]."""
    bits = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1) & _powers(device)
    return (bits != 0).float().mul_(2.0).sub_(1.0)


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
