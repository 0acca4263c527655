"""Host memory for what an optimizer updates: fp32 parameters, gradients and state of this rank's parts.

On a GPU the memory is pinned, gradients are copied down on a CUDA stream of their own, and the step runs on the CPU.

Source: Ren et al. 2021 (arXiv:2101.06840): gradients and states on the host, parameters on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from hf_parallel.errors import UnsupportedError
from hf_parallel.settings.replica_sections import ZeroConfig


class HostMemory:
    """Host copies of tensors of one device, and the copying between them.

    Args:
        device: Device of the tensors that are copied from and to.
        pinned: Whether the memory is pinned; only next to a GPU.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.pinned = pinned
        self._down = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """New memory f[numel], not filled."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def copy_down(self, source: Tensor, target: Tensor) -> None:
        """Start to copy a tensor of the device into host memory; the source may be freed, `wait` waits for the copy."""
        if self._down is None:
            target.copy_(source)
            return
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._down)  # or the allocator would reuse its memory before the copy has run

    def wait(self) -> None:
        """Wait for all copies, in both directions: their targets may be read and their sources written."""
        if self._down is not None:
            self._down.synchronize()
            torch.cuda.current_stream(self._device).synchronize()


def pins(zero: ZeroConfig, device: torch.device) -> bool:
    """Whether host memory next to a device is pinned, as `zero.pin_memory` says.

    Raises:
        UnsupportedError: It is to be, and there is no GPU.
    """
    has_gpu = device.type == "cuda"
    if zero.pin_memory is True and not has_gpu:
        raise UnsupportedError(
            f"zero.pin_memory=true with the model on {device.type}: memory is pinned for copies to a GPU. Set zero.pin_memory to "
            "auto."
        )
    return has_gpu if zero.pin_memory == "auto" else zero.pin_memory


def host_memory(zero: ZeroConfig, device: torch.device) -> HostMemory | None:
    """The host memory that holds the optimizer of parameters on `device`; None if it stays beside them."""
    return HostMemory(device, pinned=pins(zero, device)) if zero.offload_optimizer == "cpu" else None


class FusedOnHost:
    """Lets Adam and AdamW step by torch's fused CPU kernel, unless their user chose a kernel.

    `fused` is set only while a step runs, so that a saved state has the user's own value.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._changed: list[dict[str, object]] = []
        self._applies = type(optimizer) in (Adam, AdamW)
        optimizer.register_state_dict_pre_hook(lambda own: self.after())

    def before(self, groups: Iterable[dict[str, object]]) -> None:
        """Choose the fused kernel, for a step that begins, in groups that leave the choice open."""
        self.after()  # one that raised has not ended
        if self._applies:
            free = ("fused", "foreach")
            self._changed = [
                group
                for group in groups
                if all(group.get(name) is None for name in free) and not group.get("differentiable")
            ]
        for group in self._changed:
            group["fused"] = True

    def after(self) -> None:
        """Leave the choice of the kernel open again."""
        for group in self._changed:
            group["fused"] = None
        self._changed = []
