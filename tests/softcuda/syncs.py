"""Counts how often the host waits for a device, with the line that made it wait."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.cuda._gpu_trace as gpu_trace


EARLIER = "earlier: "


class HostSyncs:
    """The places at which the host waited, while it counts; those where it waited for an event from before, for which the device
    need not be idle, begin with EARLIER.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.counts = False
        self._events: set[int] = set()  # recorded while it counts
        torch._C._activate_gpu_trace()
        gpu_trace.register_callback_for_stream_synchronization(lambda stream: self._note())
        gpu_trace.register_callback_for_event_record(lambda event, stream: self._events.add(event))
        gpu_trace.register_callback_for_event_synchronization(
            lambda event: self._note("" if event in self._events else EARLIER)
        )
        gpu_trace.register_callback_for_device_synchronization(self._note)

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Inside, waits are noted in the list."""
        self.places, self.counts = [], True
        self._events.clear()
        try:
            yield self.places
        finally:
            self.counts = False

    def _note(self, kind: str = "") -> None:
        if self.counts:
            self.places.append(kind + _place(traceback.extract_stack()))


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line outside of torch; a backward pass has none where torch itself waits."""
    skipped = (str(Path(torch.__file__).parent), __file__)
    own = [frame for frame in stack if not frame.filename.startswith(skipped)]
    if not own:
        return "autograd"
    frame = own[-1]
    return f"{'/'.join(Path(frame.filename).parts[-4:])}:{frame.lineno} {frame.line}"
