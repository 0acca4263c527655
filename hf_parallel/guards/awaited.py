"""Numbers that ranks tell each other, read without waiting for a GPU: those of one step are judged in the next."""

from __future__ import annotations

import torch


class Awaited:
    """Numbers that are on their way to the CPU."""

    def __init__(self) -> None:
        self._under_way: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def swap(self, numbers: torch.Tensor) -> list[list[int]]:
        """What can be read now: `numbers` i or f[N M] themselves, or from a GPU those of the call before; then [] at first."""
        before = self._under_way
        if numbers.device.type == "cuda":
            here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            here.copy_(numbers, non_blocking=True)
            self._under_way = here, torch.cuda.current_stream(numbers.device).record_event()
            if before is None:
                return []
            before[1].synchronize()
            numbers = before[0]
        return [[int(number) for number in row] for row in numbers.tolist()]
