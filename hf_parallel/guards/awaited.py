"""Numbers that a step is judged by, read without waiting for a GPU: there they are judged when the next step comes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_its_way(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A copy on the CPU of numbers of a GPU, and the event after which it has their values."""
    here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    return here, torch.cuda.current_stream(numbers.device).record_event()


class Awaited:
    """Numbers that are on their way to the CPU.

    Args:
        judge: Given them there, raises what is wrong with the step.
    """

    def __init__(self, judge: Callable[[Tensor], None]) -> None:
        self._judge = judge
        self._under_way: tuple[Tensor, torch.cuda.Event] | None = None

    def give(self, numbers: Tensor) -> None:
        """Judge the step before, if it is not judged yet, and this one at once if `numbers` are not on a GPU."""
        self.settle()
        if numbers.device.type != "cuda":
            self._judge(numbers)
            return
        self._under_way = on_its_way(numbers)

    def settle(self) -> None:
        """Judge a step that is not judged yet; before its weights are evaluated or saved. Waits for the device."""
        before, self._under_way = self._under_way, None
        if before is not None:
            before[1].synchronize()
            self._judge(before[0])
