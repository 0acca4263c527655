"""Flat buffers that are used again in the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_parallel.compat.private_torch import is_referred_to


class BufferPool:
    """Flat buffers in CPU memory, handed out again once nothing else refers to their memory: new pages cost time.

    Other devices have a pool of torch's own. While the gradients of several backward passes add up, what is held here would be
    a second copy of them: the owner forgets it when it sees such a pass.

    Attributes:
        keeps: Whether buffers are held at all.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._held: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """f[numel], not filled; as long as it, or a view of it, is referred to, nobody else gets its memory."""
        if device.type != "cpu" or not self.keeps:
            return torch.empty(numel, dtype=dtype, device=device)
        held = self._held.setdefault((numel, dtype), [])
        for buffer in held:
            if not is_referred_to(buffer):
                return buffer.view(-1)
        held.append(torch.empty(numel, dtype=dtype))
        return held[-1].view(-1)

    def forget(self) -> None:
        """Hold none any more."""
        self._held.clear()
