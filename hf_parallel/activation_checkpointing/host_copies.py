"""Inputs of checkpointed blocks in host memory: down while the blocks run, up before they are run again.

On a GPU host memory is pinned and both ways have a stream of their own, so copies go on while blocks compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor


Follow: TypeAlias = Callable[[Tensor], Callable[[Tensor], None] | None]


class CopyStreams:
    """Two side streams of a GPU, made when they are first needed; none elsewhere.

    Args:
        follow: Called with every tensor that leaves its device; what it returns, if anything, is called with the tensor that
            replaces it later. For code that knows tensors by their memory.
    """

    def __init__(self, follow: Follow = lambda tensor: None) -> None:
        self.follow = follow
        self._made: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def of(self, device: torch.device, way: str) -> torch.cuda.Stream | None:
        """The stream of one way, "down" or "up"."""
        if device.type != "cuda":
            return None
        if (device, way) not in self._made:
            self._made[device, way] = torch.cuda.Stream(device)
        return self._made[device, way]


class HostCopy:
    """A tensor on its way to host memory, there, or on its way back.

    Args:
        tensor: Tensor on any device; nobody may write to it before `settle`.
        streams: Streams for the copies.
    """

    def __init__(self, tensor: Tensor, streams: CopyStreams) -> None:
        self._streams, self._device = streams, tensor.device
        self._down = streams.of(tensor.device, "down")
        # Hidden states f[B/m S H], as the block was called with them.
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=self._down is not None)
        self._back: Tensor | None = None
        self._source: Tensor | None = tensor
        self._moved: Callable[[Tensor], None] | None = None
        if self._down is None:
            self._host.copy_(tensor)
        else:
            self._down.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._down):
                self._host.copy_(tensor, non_blocking=True)

    @property
    def host(self) -> Tensor:
        """The copy in host memory."""
        return self._host

    def settle(self) -> None:
        """Let go of the tensor: what comes next on its stream may write to its memory."""
        if self._source is None:
            return
        self._moved = self._streams.follow(self._source)
        if self._down is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._down)
        self._source = None

    def fetch(self) -> None:
        """Begin to bring the values back, unless that has begun."""
        up = self._streams.of(self._device, "up")
        if self._back is not None:
            return
        self._back = torch.empty_like(self._host, device=self._device)
        if up is None or self._down is None:
            self._back.copy_(self._host)
            return
        # The new tensor's memory may still be read by what was asked for before.
        up.wait_stream(torch.cuda.current_stream(self._device))
        up.wait_stream(self._down)
        with torch.cuda.stream(up):
            self._back.copy_(self._host, non_blocking=True)
        self._back.record_stream(up)  # else the allocator could give its memory away while `up` still writes to it

    def get(self) -> Tensor:
        """The values on their device, in the same tensor until `forget`."""
        if self._back is None:
            self.fetch()
        up = self._streams.of(self._device, "up")
        if up is not None:
            torch.cuda.current_stream(self._device).wait_stream(up)
        if self._back is None:
            raise RuntimeError("fetch() left nothing")
        if self._moved is not None:
            self._moved(self._back)
        return self._back

    def forget(self) -> None:
        """Keep the values in host memory only."""
        self._back = None
