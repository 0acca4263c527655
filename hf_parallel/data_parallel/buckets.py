"""Gradient buckets: flat buffers of parameters that are neighbours in backward order.

Buckets follow the backward order (last parameter first), so all ranks get the same layout without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import copy_scaled
from hf_parallel.data_parallel.buffer_pool import BufferPool
from hf_parallel.errors import ConfigError, UnsupportedError


BUCKET_BYTES = 25 * 2**20  # as DDP, which closes a bucket that has reached its size, too


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced in one flat buffer.

    Args:
        names: Names of the parameters.
        params: The parameters.
        offsets: Offset of each one's elements in the buffer.
        numel: Elements of the buffer, gaps and padding included; those hold zeros.
        dtype: Dtype of the buffer: fp32, unless bf16 is asked for or the parameters are wider.
        device: Device of the parameters.
        kind: Kind of its parameters; `lay_out` puts different kinds into different buckets.
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

    @property
    def has_gaps(self) -> bool:
        """Whether some elements of the buffer are of no parameter."""
        return sum(param.numel() for param in self.params) < self.numel

    def slots(self, flat: Tensor) -> list[Tensor]:
        """The views of a buffer that belong to the parameters, each in its shape."""
        return [
            flat[start : start + param.numel()].view_as(param)
            for param, start in zip(self.params, self.offsets, strict=True)
        ]

    def unpack(self, flat: Tensor, present: Sequence[bool]) -> None:
        """Make the gradients views of a reduced buffer; a parameter that is not `present` keeps None."""
        for param, slot, here in zip(self.params, self.slots(flat), present, strict=True):
            if here:
                param.grad = slot.to(param.dtype)

    def refuse_sparse(self) -> None:
        """Raise for a gradient that does not lie in a dense buffer."""
        for name, param in zip(self.names, self.params, strict=True):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise UnsupportedError(
                    f"gradient of {name} has layout {param.grad.layout}: gradients are reduced in dense buckets. "
                    "Build the embedding with sparse=False."
                )


@dataclass(slots=True)
class Packed:
    """A flat buffer, f[bucket.numel + flags], and the positions of the gradients in it, multiplied by `factor`.

    Attributes:
        slots: The views of the buffer, made at once: a hook that runs between large products finds no code in the cache.
        present: Whether each parameter has a gradient in the buffer, once no more follow.
    """

    bucket: Bucket
    flat: Tensor
    factor: float
    moved: set[int] = field(default_factory=set)
    slots: list[Tensor] = field(init=False)
    present: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        self.slots = self.bucket.slots(self.flat)

    def take_rest(self) -> None:
        """Move the gradients that there are into the buffer; no more follow: zeros where none has moved to."""
        params = self.bucket.params
        found = [(at, param.grad) for at, param in enumerate(params) if param.grad is not None]
        if found:
            copy_scaled([self.slots[at] for at, _ in found], [grad for _, grad in found], self.factor)
        for at, _ in found:
            self.moved.add(at)
            params[at].grad = None
        self.present = tuple(position in self.moved for position in range(len(params)))
        if not all(self.present):
            for slot, here in zip(self.slots, self.present, strict=True):
                if not here:
                    slot.zero_()


class Packer:
    """Moves gradients into the flat buffers of their buckets, multiplied by a factor.

    A CPU copies a gradient as soon as it is complete, while it still is in the cache, and its memory serves the next one. A GPU
    copies all of a bucket by few kernels. `p.grad` becomes None, so the step needs no second copy of all gradients.

    Args:
        buckets: The buckets.
        pool: Gives the buffers.
        flagged: Append one number a parameter that tells whether it had a gradient.
        beside: Numbers f[num_beside] that are sent behind the first bucket.
        num_beside: Count of these numbers.

    Attributes:
        factor: Factor for the gradients of buckets whose first one moves from now on.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        pool: BufferPool,
        *,
        flagged: bool,
        beside: Callable[[], Tensor] | None = None,
        num_beside: int = 0,
    ) -> None:
        self._buckets, self._pool, self._flagged = buckets, pool, flagged
        self._beside, self._num_beside = beside, num_beside
        self.factor = 1.0
        self._filling: dict[int, Packed] = {}

    @property
    def has_begun(self) -> bool:
        """Whether gradients are in buffers that were not handed over yet."""
        return bool(self._filling)

    def arrived(self, index: int, position: int) -> None:
        """Move a complete gradient into its bucket; the others of the bucket will have the same factor."""
        # With `create_graph=True`; autograd has switched it off else, and entering `no_grad` takes time.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.arrived(index, position)
            return
        bucket = self._buckets[index]
        param = bucket.params[position]
        gradient = param.grad
        if gradient is None or bucket.device.type != "cpu" or gradient.layout != torch.strided:
            return
        packed = self._filling.get(index)
        if packed is None:
            packed = self._filling[index] = self._new(bucket)
        copy_scaled([packed.slots[position]], [gradient], packed.factor)
        packed.moved.add(position)
        param.grad = None

    def pack(self, index: int) -> Packed:
        """The buffer of a bucket with the gradients that there are, and zeros for the others.

        Raises:
            UnsupportedError: If a gradient is sparse; it was not moved then.
        """
        bucket = self._buckets[index]
        bucket.refuse_sparse()
        packed = self._filling.pop(index, None) or self._new(bucket)
        packed.take_rest()
        if self._flagged:
            flags = packed.flat[bucket.numel : bucket.numel + len(bucket.params)]
            flags.copy_(torch.tensor(packed.present)) if not all(packed.present) else flags.fill_(1.0)
        if self._beside is not None and index == 0:
            packed.flat[-self._num_beside :].copy_(self._beside())
        return packed

    def _new(self, bucket: Bucket) -> Packed:
        flags = len(bucket.params) if self._flagged else 0
        flags += self._num_beside if bucket is self._buckets[0] else 0
        flat = self._pool.empty(bucket.numel + flags, bucket.dtype, bucket.device)
        return Packed(bucket, flat.zero_() if bucket.has_gaps else flat, self.factor)


def lay_out(
    params: Sequence[tuple[str, nn.Parameter]],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    kind: Callable[[str, nn.Parameter], Hashable] = lambda name, param: None,
    align: int = 1,
    multiple: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[Bucket]:
    """Buckets of the trainable parameters, in reverse order; one that has reached a size is closed.

    Args:
        params: Names and parameters, in the same order on all ranks; one that occurs twice is laid out once.
        bucket_bytes: Size at which a bucket is closed, at least 1. It is exceeded by less than the last parameter.
        kind: Parameters of different kinds are kept apart.
        align: Every parameter begins at a multiple of so many elements.
        multiple: The buffer's length is a multiple of so many elements.
        dtype: Dtype in which gradients are summed, except those of fp64 parameters.

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
        draft = drafts.setdefault(key, _Draft([], [], []))
        draft.add(name, param, align)
        if draft.end * summed.itemsize >= bucket_bytes:
            buckets.append(drafts.pop(key).closed(*key, multiple))
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
