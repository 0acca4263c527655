"""Flat buffers of parameters, each with the part of it that one rank updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.private_optimizers import allow_foreach
from hf_parallel.compat.private_torch import version_of
from hf_parallel.compat.torch_tools import sharing_memory
from hf_parallel.data_parallel.buckets import Bucket
from hf_parallel.data_parallel.host import HostMemory
from hf_parallel.errors import UnsupportedError


# State that is one number, even for a parameter that is one number itself; the last three are NAdam's and ASGD's.
PER_TENSOR = frozenset({"step", "mu_product", "eta", "mu"})
PIECE = 2**22  # elements that are compared at once
CHANGED_PARTS = (
    "parameters in optimizer.param_groups were changed outside of optimizer.step() with zero.stage above 0: there the optimizer "
    "has flat parts of all parameters, each rank others, so the change would reach one replica only, and norms and rows are not "
    "those of a parameter. Change model.parameters() instead, in any way that keeps their shapes."
)
ALIGN = 32  # elements: parameters start at multiples of 64 bytes or more, which kernels need for vector loads


class FlatParameter(nn.Parameter):
    """A part that stands for parameters in an optimizer. Changes through `.data`, which torch hides, count in its version."""

    @property
    def data(self) -> Tensor:
        """The same memory, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if new.data_ptr() == self.data_ptr() and new.shape == self.shape and new.dtype == self.dtype:
            return  # `p.data *= x`
        raise UnsupportedError(
            f"p.data = ... was called on a parameter in optimizer.param_groups, of shape {tuple(self.shape)}, with zero.stage "
            "above 0: it is a part of a buffer whose memory has to stay. Assign to model.parameters(), or, in the step of an "
            "optimizer of yours, change it in place (p.data.copy_(...))."
        )

    @property
    def requires_grad(self) -> bool:
        """True: parts are always updated."""
        return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self.requires_grad_(trained)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Freezing a part would freeze nothing: the parameters in it have gradients of their own.

        Raises:
            UnsupportedError: It would.
        """
        if not requires_grad:
            raise UnsupportedError(
                "requires_grad of a parameter of an optimizer that is partitioned (zero.stage above 0) was set to False: the "
                "optimizer itself has flat parts of several parameters. Freeze parameters of the model, or of the optimizer that "
                "accelerator.prepare() returned and that callbacks are given."
            )
        return self


@dataclass(frozen=True, slots=True)
class FlatKind:
    """Properties that all parameters of one flat buffer share."""

    dtype: torch.dtype
    group: int
    user: Hashable


@dataclass(eq=False)
class FlatShard:
    """One flat buffer of parameters, and the part of it that this rank updates.

    Args:
        bucket: Its layout.
        group: Index of the optimizer's parameter group.
        flat: Storage of the parameters, in their dtype.
        shard: This rank's part of `flat`, a view.
        master: What the optimizer updates: `shard` itself, or a copy: in fp32 where the parameters are in half precision, in
            host memory where the optimizer is.
        start: First element of the part.
        slots: Views of `flat` for the parameters, in their shapes.
        sharers: The ranks that have the other parts; None if there are none.
        host_gradient: Host memory for the part's gradient, where the optimizer is there.
        counted: Elements of the part that this rank counts in norms, with a mask where it counts some of them.
        absent: Elements of the part that had no gradient on any rank.
        saved: During a step, what they were: tensor, elements, values.
        had_state: During a step, whether the optimizer had state of the elements before it.
        noted: Version of `master` when it was last changed by a step or by us.
        times: Number of gradients that `master` has had, one after the other.
    """

    bucket: Bucket
    group: int
    flat: Tensor
    shard: Tensor
    master: nn.Parameter
    start: int
    slots: list[Tensor]
    sharers: dist.ProcessGroup | None = None
    host_gradient: Tensor | None = None
    counted: list[tuple[slice, Tensor | None]] = field(default_factory=list)
    absent: list[slice] = field(default_factory=list)
    saved: list[tuple[Tensor, slice, Tensor]] = field(default_factory=list)
    had_state: bool = True
    noted: int = 0
    times: int = 0

    @property
    def is_copy(self) -> bool:
        """Whether `master` has memory of its own."""
        return self.is_finer or self.host_gradient is not None

    @property
    def is_finer(self) -> bool:
        """Whether `master` is more precise than the parameters."""
        return self.master.dtype != self.shard.dtype

    def note(self) -> None:
        """Remember the version of `master`: `refuse_changes` finds what user code writes to it later."""
        self.noted = version_of(self.master)

    def refuse_changes(self) -> None:
        """Refuse what user code wrote to `master` since.

        Raises:
            UnsupportedError: It was changed.
        """
        if self.noted != version_of(self.master):
            raise UnsupportedError(CHANGED_PARTS)

    @torch.no_grad()
    def return_to_buffer(self) -> None:
        """Move parameters that got other memory (`p.data = ...`) back into the buffer, with their new values.

        Raises:
            UnsupportedError: One has another shape, dtype or device now.
        """
        for name, param, slot in zip(self.bucket.names, self.bucket.params, self.slots, strict=True):
            same = param.shape == slot.shape and param.dtype == slot.dtype
            if same and param.data_ptr() == slot.data_ptr() and param.is_contiguous():
                continue
            if not same or param.device != slot.device:
                raise UnsupportedError(
                    f"parameter {name} was given data of shape {tuple(param.shape)}, {param.dtype} on {param.device} during "
                    f"training: with ZeRO it lies in a buffer as {tuple(slot.shape)}, {slot.dtype} on {slot.device}. Assign "
                    "values of that kind, or change the model before it is prepared."
                )
            slot.copy_(param.detach().clone())
            param.data = slot

    @torch.no_grad()
    def take_edits(self) -> None:
        """Copy elements of the parameters that user code changed, those that differ from `master`, into `master`.

        The comparison stays on the device (`torch.where`), so nothing waits for it.
        """
        if not self.is_copy:
            return
        for mine, seen in zip(self.master.data.split(PIECE), self.shard.split(PIECE), strict=True):
            seen = seen.to(mine.device)
            mine.copy_(torch.where(mine.to(seen.dtype) == seen, mine, seen.to(mine.dtype)))

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the buffer."""
        return self.bucket.params

    def places(self, flat: Tensor) -> list[Tensor]:
        """The views of another buffer of this layout that would belong to the parameters, in their shapes."""
        pairs = zip(self.bucket.offsets, self.slots, strict=True)
        return [place_in(flat, offset, slot.shape) for offset, slot in pairs]

    @torch.no_grad()
    def move_to(self, flat: Tensor) -> None:
        """Let the parameters, and the part of them that is updated, have the memory of `flat`, with the values that they have now."""
        if flat is self.flat:
            return
        flat.copy_(self.flat)
        self.flat, self.slots = flat, self.places(flat)
        self.shard = flat[self.start : self.start + self.shard.numel()]
        if not self.is_copy:
            Tensor.data.__set__(self.master, self.shard)  # type: ignore[attr-defined]  # past `FlatParameter`, as in `flatten`
        for param, slot in zip(self.bucket.params, self.slots, strict=True):
            param.data = slot

    def inside(self, position: int) -> slice | None:
        """Elements of `master` that belong to a parameter of the bucket; None if none do."""
        offset, count = self.bucket.offsets[position], self.bucket.params[position].numel()
        low = max(offset - self.start, 0)
        high = min(offset + count - self.start, self.shard.numel())
        return slice(low, high) if low < high else None

    def part_of(self, position: int, whole: Tensor) -> tuple[slice, Tensor] | None:
        """The elements of a parameter that are in this part: where, and their values in `whole`, of its shape."""
        piece = self.inside(position)
        if piece is None:
            return None
        begin = self.start + piece.start - self.bucket.offsets[position]
        return piece, whole.reshape(-1)[begin : begin + piece.stop - piece.start]


def fingerprint(part: Tensor) -> Tensor:
    """A number, i64 on the part's device, that changes with any element of `part`, but for one chance in 2^64."""
    bits = part.view(torch.int16 if part.element_size() == 2 else torch.int32)
    # Odd weights, so that a change of one element always shows; different ones, so that an exchange of two does.
    weights = torch.arange(1, 2 * min(PIECE, bits.numel()), 2, device=part.device).mul_(-0x61C8864680B583EB)
    found = torch.zeros((), dtype=torch.int64, device=part.device)
    for piece in bits.split(PIECE):
        found = found * 0x5851F42D4C957F2D + (piece * weights[: piece.numel()]).sum()
    return found


def refuse_overlaps(params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory: each would get a place of its own in the buffer.

    Raises:
        UnsupportedError: Names them.
    """
    found = sharing_memory(params)
    if found is not None:
        raise UnsupportedError(
            f"parameters {found[0]} and {found[1]} are two objects that share memory: with ZeRO each gets memory of its own "
            "and they would no longer be equal. Tie them by assigning one Parameter to both modules, or set "
            "zero.stage to 0."
        )


def place_in(flat: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A tensor in memory of `flat` whose storage has no more than its own bytes.

    What saves a model takes tensors of one storage for aliases of each other: accelerate's `save_model` writes one of them
    and drops the rest. A view would share the storage of the whole buffer.

    Args:
        flat: One-dimensional, at the start of its storage.
        offset: First element.
        shape: Shape of the tensor, contiguous.
    """
    start = offset * flat.element_size()
    storage = flat.untyped_storage()[start : start + math.prod(shape) * flat.element_size()]
    empty: Any = torch.empty(0, dtype=flat.dtype, device=flat.device)  # the stubs of torch lack this form of set_
    placed: Tensor = empty.set_(storage, 0, tuple(shape))
    return placed


@torch.no_grad()
def flatten(bucket: Bucket, group: dist.ProcessGroup | None, host: HostMemory | None = None) -> FlatShard:
    """Move the parameters of a bucket into one buffer; each `p.data` becomes a place in it, so parameters keep identity.

    Args:
        bucket: Its layout.
        group: Ranks that share its parts; None for this rank alone.
        host: Memory for the optimizer's copy of this rank's part; None leaves it next to the parameters.
    """
    kind = bucket.kind
    if not isinstance(kind, FlatKind):
        raise TypeError(f"a bucket of kind {kind!r} was not laid out for a partition")
    flat = torch.zeros(bucket.numel, dtype=kind.dtype, device=bucket.device)  # (elements,), divisible by the ranks
    slots = []
    for param, offset in zip(bucket.params, bucket.offsets, strict=True):
        slot = place_in(flat, offset, param.shape)
        slot.copy_(param)
        param.data = slot
        slots.append(slot)
    allow_foreach(FlatParameter)
    length = bucket.numel // (1 if group is None else group.size())
    start = 0 if group is None else group.rank() * length
    shard = flat[start : start + length]  # (elements / ranks,), a view
    dtype = torch.promote_types(kind.dtype, torch.float32)  # of the optimizer, whatever gradients travel in
    if host is not None:
        master, host_gradient = (host.empty(length, dtype) for _ in range(2))
        copied = FlatParameter(master.copy_(shard))
        return FlatShard(bucket, kind.group, flat, shard, copied, start, slots, group, host_gradient)
    mine = shard.to(dtype).data  # `.data`: writes to the buffer by a gather do not count as changes of the part
    return FlatShard(bucket, kind.group, flat, shard, FlatParameter(mine), start, slots, group)


def counted_pieces(
    shard: FlatShard, counted: Callable[[str, nn.Parameter], bool | Tensor]
) -> list[tuple[slice, Tensor | None]]:
    """Elements of a part that this rank counts; neighbours are merged over the gaps between them, which hold zeros."""
    found: list[tuple[slice, Tensor | None]] = []
    mergeable = False
    for position, (name, param) in enumerate(zip(shard.bucket.names, shard.bucket.params, strict=True)):
        piece, wanted = shard.inside(position), counted(name, param)
        if isinstance(wanted, Tensor):
            part = shard.part_of(position, wanted)
            found += [(part[0], part[1].to(shard.master.device))] if part is not None else []
        elif wanted and piece is not None:
            if mergeable:
                found[-1] = (slice(found[-1][0].start, piece.stop), None)
            else:
                found.append((piece, None))
        mergeable = wanted is True and bool(found)
    return found


def is_per_element(value: object, key: str, like: Tensor) -> TypeGuard[Tensor]:
    """Whether a value of an optimizer's state has one entry for each element of `like`, its parameter or flat part."""
    return isinstance(value, Tensor) and value.shape == like.shape and key not in PER_TENSOR


def pack_state(shard: FlatShard, states: Mapping[int, Mapping[str, object]]) -> dict[str, object]:
    """Optimizer state of a flat part from that of its parameters.

    Args:
        shard: The part.
        states: Position in the bucket -> state of that parameter; tensors of its shape, or numbers.
    """
    packed: dict[str, object] = {}
    for position, state in states.items():
        param = shard.bucket.params[position]
        for key, value in state.items():
            if not is_per_element(value, key, param):
                number = value.clone() if isinstance(value, Tensor) else value
                _require_one_number(shard.bucket.names[position], key, packed.setdefault(key, number), number)
                continue
            whole = packed.setdefault(key, torch.zeros_like(shard.master, dtype=value.dtype))
            part = shard.part_of(position, value)
            if part is not None and isinstance(whole, Tensor):
                whole[part[0]] = part[1].to(whole.device)
    return packed


def _require_one_number(name: str, key: str, one: object, other: object) -> None:
    """Refuse states of parameters of one flat part that differ in a number which the part has once.

    Raises:
        UnsupportedError: They had others when the optimizer was prepared.
    """
    if one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)):
        return
    if isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
        raise UnsupportedError(
            f"the optimizer had stepped before it was prepared, and its state {key} is {_shown(other)} for {name} and {_shown(one)} "
            "for another parameter (it had no gradient in some of these steps), with zero.stage above 0: the parameters of a flat "
            "part share one number. Prepare an optimizer that has not stepped, or one whose parameters had gradients in the same "
            "steps, or set zero.stage to 0 or 3."
        )


def _shown(value: object) -> str:
    return f"{value.item():g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)
