"""Sum gradients over a process group once per optimizer step, in flat buckets.

Not DDP: accumulation, pipeline stages that share a parameter and later the compressed wire all need the reduction as one
explicit call. Buckets follow the backward order (last parameter first), so all ranks agree on the layout without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.errors import ConfigError, UnsupportedError


@dataclass(slots=True)
class ReduceCounters:
    """All-reduces started, and the bytes of their buckets, since the reducer was built."""

    collectives: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters reduced together; the flat buffer holds their gradients, then one presence flag a parameter."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    device: torch.device

    def pack(self) -> tuple[Tensor, tuple[bool, ...]]:
        """Move the gradients into a new flat buffer; return it and which parameters had one.

        The parameters give their gradients up, so that the step needs one bucket of memory more, not a second copy.
        """
        flat = torch.empty(sum(self.sizes) + len(self.sizes), dtype=self.dtype, device=self.device)
        *slots, flags = torch.split(flat, [*self.sizes, len(self.sizes)])
        grads = [param.grad for param in self.params]
        present = tuple(grad is not None for grad in grads)
        pairs = [(slot.view_as(grad), grad) for slot, grad in zip(slots, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([slot for slot, _ in pairs], [grad for _, grad in pairs])
        if all(present):
            flags.fill_(1.0)
        else:
            torch._foreach_zero_([slot for slot, here in zip(slots, present, strict=True) if not here])
            flags.copy_(torch.tensor(present))
        for param in self.params:
            param.grad = None
        return flat, present

    def unpack(self, flat: Tensor, present: tuple[bool, ...]) -> None:
        """Make the gradients views of the reduced buffer; a parameter without a gradient on any rank keeps None."""
        *slots, flags = torch.split(flat, [*self.sizes, len(self.sizes)])
        # Reading the flags waits for the device; a rank that had every gradient need not know who else had.
        anywhere = present if all(present) else [count > 0.0 for count in flags.tolist()]
        for param, slot, here in zip(self.params, slots, anywhere, strict=True):
            if here:
                param.grad = slot.view_as(param).to(param.dtype)

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [param.numel() for param in self.params]


class GradientReducer:
    """Averages (or sums) the gradients of fixed parameters over a group, with one all-reduce a bucket.

    Gradients in bf16 or fp16 are summed in fp32. A parameter that has a gradient on some ranks only counts as zero on
    the others; one that has none anywhere keeps ``grad = None``, so that the optimizer does not decay it. The flags
    that tell the two apart ride in the bucket.

    Args:
        params: Names and parameters, in the same order on all ranks. Frozen ones are left out; a parameter that occurs
            twice is reduced once.
        group: The group to sum over; None, or a group of one rank, applies the factor alone.
        bucket_bytes: Size at which a bucket is closed, at least 1 (default 25 MiB, as DDP).

    Attributes:
        counters: Collectives and bytes so far.

    Raises:
        ConfigError: If ``bucket_bytes`` is below 1.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte. Use 26214400 (25 MiB).")
        self.group = group
        self.counters = ReduceCounters()
        self._buckets = _layout(params, bucket_bytes)

    @property
    def num_buckets(self) -> int:
        """Number of buckets, the number of all-reduces of one `reduce`."""
        return len(self._buckets)

    @torch.no_grad()
    def reduce(self, factor: float) -> None:
        """Replace every gradient by ``factor`` times its sum over the group; call once per optimizer step.

        Afterwards ``p.grad`` may be a view of a bucket; it stays valid under both forms of ``zero_grad``.

        Raises:
            UnsupportedError: If a gradient is sparse; nothing is sent then.
        """
        self._refuse_sparse()
        if self.group is None or self.group.size() == 1:
            self._scale(factor)
            return
        under_way = []
        for bucket in self._buckets:
            flat, present = bucket.pack()
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.counters.collectives += 1
            self.counters.bytes += flat.nbytes
            under_way.append((bucket, flat, present, work))
        for bucket, flat, present, work in under_way:
            if work is not None:
                work.wait()
            if factor != 1.0:
                flat[: -len(bucket.params)].mul_(factor)
            bucket.unpack(flat, present)

    def _refuse_sparse(self) -> None:
        for bucket in self._buckets:
            for name, param in zip(bucket.names, bucket.params, strict=True):
                if param.grad is not None and param.grad.layout != torch.strided:
                    raise UnsupportedError(
                        f"gradient of {name} has layout {param.grad.layout}: gradients are reduced in dense buckets. "
                        "Build the embedding with sparse=False."
                    )

    def _scale(self, factor: float) -> None:
        grads = [param.grad for bucket in self._buckets for param in bucket.params if param.grad is not None]
        if grads and factor != 1.0:
            torch._foreach_mul_(grads, factor)


def _layout(params: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[_Bucket]:
    """Return the buckets: trainable parameters in reverse order, a new bucket when the size would be exceeded."""
    unique = {id(param): (name, param) for name, param in reversed(params) if param.requires_grad}
    open_buckets: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets = []

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        names, members = zip(*open_buckets.pop(key), strict=True)
        buckets.append(_Bucket(names, members, *key))

    for name, param in unique.values():
        dtype = torch.promote_types(param.dtype, torch.float32)
        key = (dtype, param.device)
        size = param.numel() * dtype.itemsize
        if key in open_buckets and filled[key] + size > bucket_bytes:
            close(key)
        filled[key] = size + (filled[key] if key in open_buckets else 0)
        open_buckets.setdefault(key, []).append((name, param))
    for key in list(open_buckets):
        close(key)
    return buckets
