"""The communicating functions of tensor parallelism, as autograd functions on plain local tensors.

Megatron's pair f and g (Shoeybi et al. 2019, arXiv:1909.08053, section 3) plus a gather: outside a column -> row pair
all ranks hold the same values and the same gradients, inside they hold partial ones. Those that cut and gather a
sequence are in `sequence_functions`. No function works in place on a tensor autograd may need.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hf_parallel.compat.private_collectives import all_gather_new, all_reduce_flat, wait_for
from hf_parallel.compat.private_torch import version_of
from hf_parallel.monitor.recorder import Recorder
from hf_parallel.tensor_parallel.layout import split_units


T = TypeVar("T")


class VirtualGroup:
    """One rank of a tensor-parallel group whose ranks are threads of this process.

    It lets a plan be checked with all of its ranks in one process, without any process group. CPU only: there the
    backward pass runs in the thread that asked for it.

    Args:
        slots: A list with one entry per rank, shared by all ranks of the group.
        barrier: A barrier for as many threads as there are ranks, shared as well.
        tp_rank: This rank.
    """

    def __init__(self, slots: list[Tensor | None], barrier: threading.Barrier, tp_rank: int) -> None:
        self._slots = slots
        self._barrier = barrier
        self._tp_rank = tp_rank

    def size(self) -> int:
        """Number of ranks."""
        return len(self._slots)

    def rank(self) -> int:
        """This rank."""
        return self._tp_rank

    def abort(self) -> None:
        """End the waits of the other ranks with an error."""
        self._barrier.abort()

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Copies of the tensor each rank passed, in rank order; all ranks of the group must call this."""
        self._slots[self._tp_rank] = x.detach()
        self._barrier.wait()
        tensors = [slot.clone() for slot in self._slots if slot is not None]
        self._barrier.wait()
        return tensors


class Metered:
    """A group whose collectives are recorded.

    Args:
        bare: The group.
        recorder: Counts their bytes and keeps when they were.
        axis: Axis of the mesh along which the group is.
    """

    def __init__(self, bare: ProcessGroup, recorder: Recorder, axis: Literal["tp", "ep"] = "tp") -> None:
        self.bare, self.recorder, self.axis = bare, recorder, axis

    def size(self) -> int:
        """Number of ranks."""
        return self.bare.size()

    def rank(self) -> int:
        """This rank."""
        return self.bare.rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> Metered:
        """A copy of a model communicates over the same group."""
        return self


TPGroup = ProcessGroup | VirtualGroup | Metered


def communicate(group: ProcessGroup | Metered, num_bytes: int, work: Callable[[ProcessGroup], T]) -> T:
    """``work(group)``, a collective or the wait for one, to which this rank hands so many bytes."""
    if not isinstance(group, Metered):
        return work(group)
    recorder, start = group.recorder, group.recorder.mark()
    result = work(group.bare)
    recorder.count(group.axis, num_bytes)
    recorder.add(group.axis, -1, -1, start)
    return result


def copy_to_tp(x: Tensor, group: TPGroup, *, widens: bool = False) -> Tensor:
    """f: `x` forward, gradient summed over `group` backward.

    Marks the entry of a replicated tensor into a region where each rank computes its own part. Nothing is
    communicated, and `x` itself is returned, when no gradient will be asked for.

    Args:
        x: Replicated tensor of any shape.
        group: The tensor-parallel group; all its ranks must call this. One all-reduce of `x` per backward pass.
        widens: Whether half-precision gradients are summed in fp32.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    result: Tensor = _CopyToTP.apply(x, group, widens, None)  # type: ignore[no-untyped-call]
    return result


def reduce_from_tp(x: Tensor, group: TPGroup, *, widens: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """g: sum of `x` over `group` forward, identity backward.

    Args:
        x: This rank's partial sum, of any shape.
        group: The tensor-parallel group; all its ranks must call this. One all-reduce of `x` per forward pass.
        widens: Whether half-precision tensors are summed in fp32.
        dtype: Dtype of the result; None for that of `x`.
    """
    result: Tensor = _ReduceFromTP.apply(x, group, widens, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return result


def gather_from_tp(x: Tensor, group: TPGroup, sizes: list[int]) -> Tensor:
    """Concatenation of the ranks' `x` along the last dim forward, this rank's slice of the gradient backward.

    Args:
        x: f[... sizes[rank]], this rank's part.
        group: The tensor-parallel group; all its ranks must call this. One all-gather per forward pass.
        sizes: Extent of the last dim on every rank; they may differ.

    Returns:
        f[... sum(sizes)], equal on all ranks. Its gradient must be equal on all ranks too.
    """
    result: Tensor = _GatherFromTP.apply(x, group, sizes)  # type: ignore[no-untyped-call]
    return result


def take_heads(x: Tensor, dim: int, heads: int, tp_size: int, tp_rank: int) -> Tensor:
    """This rank's heads of a replicated tensor.

    Args:
        x: Tensor with a heads dim.
        dim: The heads dim, negative; or 0 for a first dim that folds batch and heads, `[B * N, ...]`.
        heads: Number of heads N of the full tensor, at least `tp_size`.
        tp_size: Number of ranks.
        tp_rank: This rank.
    """
    sizes = split_units(heads, tp_size, 0)
    start, local = sum(sizes[:tp_rank]), sizes[tp_rank]
    if dim:
        return x.narrow(dim, start, local)
    folded = x.reshape(-1, heads, *x.shape[1:])  # (batch, heads, ...)
    return folded.narrow(1, start, local).flatten(0, 1)  # (batch * heads / tp, ...)


class Deferral(Protocol):
    """Delays weight gradients, for schedules that split backward passes."""

    @property
    def pending(self) -> list[tuple[nn.Parameter, Tensor, Tensor]] | None:
        """List of (weight, left, right) for a later `weight.grad += left.T @ right`; None: compute it at once."""


class Entered(Protocol):
    """The gathered input of a region that runs on the whole sequence."""

    def find(self, x: Tensor) -> Tensor | None:
        """The same values, whose gradient is summed over the ranks; None if `x` is something else."""

    @property
    def shard(self) -> Tensor:
        """This rank's part of it, to keep for the backward pass."""

    @property
    def again(self) -> Callable[[Tensor], Tensor]:
        """Gathers the part that was kept."""

    @property
    def wide(self) -> WideSum | None:
        """The fp32 sum in which readers add up its gradient; None if that is done in its own dtype."""


class WideSum:
    """Accumulates in fp32 the gradient of a tensor from the layers that read it, until one of them sums it over the ranks.

    Otherwise each rank would round every layer's gradient to the dtype of the tensor.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient in fp32; its memory may be kept."""
        self._total = gradient if self._total is None else self._total.add_(gradient)

    def take(self, *more: Tensor | None) -> Tensor | None:
        """The sum so far plus `more`, in new memory; the next sum starts at zero."""
        for gradient in more:
            if gradient is not None:
                self.add(gradient.to(torch.float32, copy=self._total is None))
        total, self._total = self._total, None
        return total


class SharedCopy:
    """`copy_to_tp` once per distinct tensor: consecutive linears that read one tensor share one backward all-reduce.

    One slot is enough, because the readers of a tensor run one after the other. The copy is a view that keeps its tensor
    alive, so the backward pass empties the slot; otherwise an activation would stay in memory after its step. After a forward
    pass without a backward pass one tensor stays until the next forward pass.

    Args:
        group: The tensor-parallel group.
        deferral: Puts off the weight gradients of the layers that share this; None: they are computed at once.
        widens: Whether half-precision partial sums are made and summed in fp32.

    Attributes:
        entered: Input of the region that runs; its sum over the ranks is the region's.
        wide: The fp32 sum in which readers of the last tensor add up its gradient, if that is done in fp32.
    """

    def __init__(self, group: TPGroup, deferral: Deferral | None = None, *, widens: bool = False) -> None:
        self.group = group
        self.deferral = deferral
        self.widens = widens
        self.wide: WideSum | None = None
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._copy: Tensor | None = None
        self.entered: Entered | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`copy_to_tp(x, group)`, remembered for the next call with the same tensor."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        known = self.find(x)
        if known is None:
            known = _CopyToTP.apply(x, self.group, self.widens, self)  # type: ignore[no-untyped-call]
            self.keep(x, known)
        return known

    def find(self, x: Tensor) -> Tensor | None:
        """The copy of `x` whose gradient will be summed, if `x` is the tensor of the last call and unchanged."""
        same = self._source is not None and self._source() is x and self._version == version_of(x)
        return self._copy if same else None

    def keep(self, x: Tensor, copy: Tensor, wide: WideSum | None = None) -> None:
        """Remember the copy of `x` for its other readers."""
        self._copy, self._source, self._version, self.wide = copy, weakref.ref(x), version_of(x), wide

    def partial_of(self, x: Tensor) -> Tensor | None:
        """The tensor that sharded layers read in place of `x`, if `x` is the gathered input of a region."""
        return None if self.entered is None else self.entered.find(x)

    def clear(self) -> None:
        """Forget the last tensor."""
        self._source = self._copy = self.wide = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCopy:
        """A copy of a model communicates over the same group, with a slot of its own."""
        return SharedCopy(self.group, self.deferral, widens=self.widens)


def start_sum(x: Tensor, group: TPGroup) -> Callable[[], Tensor]:
    """Begin to sum `x` over the ranks, in its own memory; the function that is returned waits for the sum."""
    if isinstance(group, VirtualGroup):
        total = sum_over(x, group)
        return lambda: total
    x = x.contiguous()
    bare = group.bare if isinstance(group, Metered) else group
    work = all_reduce_flat(x, bare)

    def wait() -> Tensor:
        communicate(group, x.nbytes, lambda bare: wait_for(work, bare))
        return x

    return wait


def is_half(dtype: torch.dtype) -> bool:
    """Whether sums in fp32 are more exact than sums in `dtype`."""
    return dtype in (torch.bfloat16, torch.float16)


def sum_over(x: Tensor, group: TPGroup, *, widens: bool = False) -> Tensor:
    """Sum of the ranks' `x`, of any shape, in new memory; outside autograd. One all-reduce.

    A half-precision tensor is summed in fp32 if it `widens`, which sends twice the bytes.
    """
    if widens and is_half(x.dtype):
        return sum_over(x.float(), group).to(x.dtype)
    if isinstance(group, VirtualGroup):
        return torch.stack(group.exchange(x)).sum(0)
    total = x.clone(memory_format=torch.contiguous_format)
    communicate(group, total.nbytes, lambda bare: wait_for(all_reduce_flat(total, bare, async_op=False), bare))
    return total


def max_over(x: Tensor, group: TPGroup) -> Tensor:
    """Largest of the ranks' `x` in each place, of any shape, in new memory; outside autograd. One all-reduce."""
    if isinstance(group, VirtualGroup):
        return torch.stack(group.exchange(x)).amax(0)
    largest = x.clone(memory_format=torch.contiguous_format)
    communicate(group, largest.nbytes, lambda bare: dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=bare))
    return largest


def gather_over(x: Tensor, group: TPGroup) -> list[Tensor]:
    """The ranks' `x`, all of one shape, in rank order; outside autograd. One all-gather."""
    if isinstance(group, VirtualGroup):
        return group.exchange(x)
    everyone = communicate(group, x.nbytes, lambda bare: all_gather_new(x, bare))
    return list(everyone.unbind())


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, widens: bool, shared: SharedCopy | None) -> Tensor:
        ctx.group, ctx.widens, ctx.shared = group, widens, shared
        return x.view_as(x)  # not `x`: the readers need a tensor of its own whose gradient is summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.shared is not None:
            ctx.shared.clear()
        return sum_over(grads[0], ctx.group, widens=ctx.widens), None, None, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, widens: bool, dtype: torch.dtype) -> Tensor:
        return sum_over(x, group, widens=widens).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0], None, None, None


class _GatherFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, sizes: list[int]) -> Tensor:
        rank = group.rank()
        ctx.start, ctx.length = sum(sizes[:rank]), sizes[rank]
        # all_gather needs equal shapes on every rank: pad the short ones.
        parts = gather_over(F.pad(x, (0, max(sizes) - sizes[rank])), group)  # tp times (..., max(sizes))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)  # (..., out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, ctx.start, ctx.length).contiguous(), None, None  # (..., out / tp)
