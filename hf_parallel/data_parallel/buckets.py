"""Gradient buckets: flat buffers of parameters that are neighbours in backward order.

Buckets follow the backward order (last parameter first), so all ranks get the same layout without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import copy_scaled
from hf_parallel.errors import ConfigError, UnsupportedError


BUCKET_BYTES = 25 * 2**20  # as DDP


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced in one flat buffer.

    Args:
        names: Of the parameters.
        params: The parameters.
        offsets: Where each one's elements begin in the buffer.
        numel: Elements of the buffer, gaps and padding included; those hold zeros.
        dtype: Of the buffer: fp32, unless bf16 is asked for or the parameters are wider.
        device: Of the parameters.
        kind: Of its parameters; `lay_out` puts different kinds into different buckets.
    """

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    kind: Hashable

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shape of each parameter on this rank."""
        return tuple(param.shape for param in self.params)

    def pack(self, *, flagged: bool, factor: float = 1.0) -> tuple[Tensor, tuple[bool, ...]]:
        """Move the gradients into a new flat buffer, multiplied by a factor; return it and which parameters had one.

        `p.grad` becomes None, so the step needs memory for one more bucket and not for a second copy of all gradients.

        Args:
            flagged: Append one number a parameter that tells whether it had a gradient.
            factor: Of the gradients.

        Raises:
            UnsupportedError: If a gradient is sparse; nothing was moved then.
        """
        self.refuse_sparse()
        grads = [param.grad for param in self.params]
        present = tuple(grad is not None for grad in grads)
        tail = len(self.params) if flagged else 0
        full = all(present) and sum(param.numel() for param in self.params) == self.numel
        make = torch.empty if full else torch.zeros
        # (elements + one flag for each parameter,)
        flat = make(self.numel + tail, dtype=self.dtype, device=self.device)
        pairs = [
            (flat[start : start + grad.numel()].view_as(grad), grad)
            for start, grad in zip(self.offsets, grads, strict=True)
            if grad is not None
        ]
        if pairs:
            copy_scaled([slot for slot, _ in pairs], [grad for _, grad in pairs], factor)
        if flagged:
            flat[self.numel :].copy_(torch.tensor(present)) if not all(present) else flat[self.numel :].fill_(1.0)
        for param in self.params:
            param.grad = None
        return flat, present

    def unpack(self, flat: Tensor, present: Sequence[bool]) -> None:
        """Make the gradients views of a reduced buffer; a parameter that is not `present` keeps None."""
        for param, start, here in zip(self.params, self.offsets, present, strict=True):
            if here:
                param.grad = flat[start : start + param.numel()].view_as(param).to(param.dtype)

    def refuse_sparse(self) -> None:
        """Raise for a gradient that does not lie in a dense buffer."""
        for name, param in zip(self.names, self.params, strict=True):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise UnsupportedError(
                    f"gradient of {name} has layout {param.grad.layout}: gradients are reduced in dense buckets. "
                    "Build the embedding with sparse=False."
                )


def lay_out(
    params: Sequence[tuple[str, nn.Parameter]],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    kind: Callable[[str, nn.Parameter], Hashable] = lambda name, param: None,
    align: int = 1,
    multiple: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[Bucket]:
    """Buckets of the trainable parameters, in reverse order; a new one begins where a size would be exceeded.

    Args:
        params: Names and parameters, in the same order on all ranks; one that occurs twice is laid out once.
        bucket_bytes: Size at which a bucket is closed, at least 1. A larger parameter has a bucket of its own.
        kind: Parameters of different kinds are kept apart.
        align: Every parameter begins at a multiple of so many elements.
        multiple: The buffer's length is a multiple of so many elements.
        dtype: In which gradients are summed, but for those of fp64 parameters.

    Raises:
        ConfigError: If `bucket_bytes` is below 1.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte. Use {BUCKET_BYTES} (25 MiB).")
    unique = {id(param): (name, param) for name, param in reversed(params) if param.requires_grad}
    drafts: dict[tuple[torch.dtype, torch.device, Hashable], _Draft] = {}
    buckets = []
    for name, param in unique.values():
        summed = param.dtype if param.dtype.itemsize > torch.float32.itemsize else dtype
        key = (summed, param.device, kind(name, param))
        draft = drafts.get(key)
        if draft is not None and (draft.end + param.numel()) * summed.itemsize > bucket_bytes:
            buckets.append(draft.closed(*key, multiple))
            draft = None
        if draft is None:
            draft = drafts[key] = _Draft([], [], [])
        draft.add(name, param, align)
    buckets += [draft.closed(*key, multiple) for key, draft in drafts.items()]
    return buckets


@dataclass(slots=True)
class _Draft:
    """A bucket that is still open."""

    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]
    end: int = 0

    def add(self, name: str, param: nn.Parameter, align: int) -> None:
        start = -(-self.end // align) * align
        self.names.append(name)
        self.params.append(param)
        self.offsets.append(start)
        self.end = start + param.numel()

    def closed(self, dtype: torch.dtype, device: torch.device, kind: Hashable, multiple: int) -> Bucket:
        numel = -(-self.end // multiple) * multiple
        return Bucket(tuple(self.names), tuple(self.params), tuple(self.offsets), numel, dtype, device, kind)
