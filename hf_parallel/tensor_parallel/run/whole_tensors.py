"""Tensors that stand for a whole sharded tensor, for code outside of the module that owns it.

`Whole` gathers the values when they are first used, inside a forward that all ranks run. `Refused` has the metadata only, and is
an error where a gather could wait for ranks that do not take part.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_torch import (
    in_backward_pass,
    no_torch_function,
    not_overridden,
    without_memory,
    writes_arguments,
)
from hf_parallel.compat.torch_tools import pytree
from hf_parallel.errors import UnsupportedError
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.run.functions import SharedCopy, gather_over, sum_over


logger = logging.getLogger(__name__)

# What a tensor tells without its values.
METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_sparse", "itemsize", "nbytes")
) | {
    getattr(Tensor, name)
    for name in (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous"),
        *("is_floating_point", "is_complex", "get_device", "__len__", "__hash__"),
    )
}


@dataclass
class Scope:
    """Code that may work on this rank's part, while `depth` is above zero."""

    depth: int = 0


@dataclass
class Reads:
    """State that the sharded modules of a model share; kept as `tp_reads` on the model.

    Args:
        copy: For the group.
        tp_rank: This rank.
        depth: Calls that are running which all ranks of the group make alike.
        reports: Whether this rank says who reads what.
        in_loss: Whether a loss of the user's runs now, outside of the model's forward.
        watching: Puts parts together in code of the user's that runs now (`parts.OnParts`).
        sums: Whether the ranks read rows of their own, so that the gradients of what each computes are summed over them.
    """

    copy: SharedCopy
    tp_rank: int
    depth: int = 0
    in_loss: bool = False
    reports: bool = False
    watching: TorchFunctionMode | None = None
    sums: bool = False
    inside: dict[int, Tensor] = field(default_factory=dict)
    outside: dict[int, Tensor] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reads:
        """A copy of a model communicates over the same group, with a state of its own."""
        return Reads(self.copy, self.tp_rank, sums=self.sums)


@dataclass
class Owned:
    """A sharded parameter or buffer, kept by key as `tp_owned` of its module.

    Args:
        name: Its first name in the model.
        spec: Its sharding.
        reads: Reads of the model.
        scope: Tells where the part itself is meant.
    """

    name: str
    spec: ShardSpec
    reads: Reads
    scope: Scope

    @property
    def setting(self) -> str:
        """The setting that keeps the tensor whole, as messages name it."""
        return (
            "ep_size to 1"
            if self.reads.sums
            else f"tensor_parallel.plan: {{{self.name.rpartition('.')[0]}: replicate}}"
        )


def stand_in(owned: Owned, part: Tensor) -> Tensor:
    """The tensor of the whole shape that a reader from outside gets for `part`."""
    reads = owned.reads
    running = reads.depth > 0 or in_backward_pass()  # there a checkpointed forward runs again
    known = reads.inside if running else reads.outside
    key = id(part)
    cached = known.get(key)
    if cached is not None and _part_of(cached) is part and (not running or _is_traced(cached) == _wanted(part)):
        return cached
    if not running:
        known[key] = Refused(owned, part)
        return known[key]
    if _wanted(part):
        result: Tensor = _StandIn.apply(part, owned)  # type: ignore[no-untyped-call]
    else:  # a parameter says that it is trained where no gradients are recorded, too
        result = Tensor.requires_grad_(Whole(owned, part), part.requires_grad and part.is_leaf)
    if reads.depth:
        known[key] = result
    return result


def _wanted(part: Tensor) -> bool:
    return torch.is_grad_enabled() and part.requires_grad


def _is_traced(tensor: Tensor) -> bool:
    return tensor.grad_fn is not None


def _part_of(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.__dict__["tp_part"]
    return part


def _tell(owned: Owned) -> None:
    """Say once who reads a sharded parameter: it costs an all-gather a forward."""
    if not owned.reads.reports or owned.name in owned.reads.reported:
        return
    owned.reads.reported.add(owned.name)
    logger.warning(
        "hf_parallel: %s is sharded over ranks and read by %s, outside of its module: it is gathered in each forward that does. "
        "Set %s to keep it whole.",
        *(owned.name, _reader(), owned.setting),
    )


def _reader() -> str:
    """The function outside of torch, of this module and of `reads` that reads."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__", "") + ".").startswith(
        (f"{__name__}.", f"{__package__}.reads.", "torch.")
    ):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name} (line {frame.f_lineno})"


def _full_shape(owned: Owned, part: Tensor) -> list[int]:
    shape = list(part.shape)
    shape[owned.spec.dim] = owned.spec.full_size
    return shape


def _wrapper(kind: Any, owned: Owned, part: Tensor) -> Any:
    made = without_memory(kind, _full_shape(owned, part), part.dtype, part.device)
    made.__dict__.update(tp_part=part, tp_owned=owned, tp_whole=None)
    return made


class Whole(Tensor):
    """The whole of a sharded tensor, gathered when its values are first used."""

    __torch_function__ = not_overridden()

    @staticmethod
    def __new__(cls: type[Whole], owned: Owned, part: Tensor) -> Whole:
        made: Whole = _wrapper(cls, owned, part)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Whole({self.__dict__['tp_owned'].name}, shape={tuple(self.shape)})"

    @property
    def requires_grad(self) -> bool:
        """Whether the part is trained; a loss of the user's may freeze it."""
        return bool(self.__dict__["tp_part"].requires_grad)

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self.requires_grad_(trained)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Train the part from the next forward pass on, or do not."""
        self.__dict__["tp_part"].requires_grad_(requires_grad)
        return self

    def values(self) -> Tensor:
        """The whole tensor, outside autograd; the first call is collective over the tensor-parallel group."""
        known: Tensor | None = self.__dict__["tp_whole"]
        if known is None:
            _tell(self.__dict__["tp_owned"])
            known = self.__dict__["tp_whole"] = gathered(self.__dict__["tp_owned"], self.__dict__["tp_part"].detach())
        return known

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if writes_arguments(func) and any(isinstance(arg, Whole) for arg in args[:1]):
            _refuse(args[0].__dict__["tp_owned"], "changed in place", _reader())
        args, kwargs = pytree.tree_map(
            lambda value: value.values() if isinstance(value, Whole) else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def gathered(owned: Owned, part: Tensor) -> Tensor:
    """The whole tensor on every rank, from each rank's `part`; collective over the tensor-parallel group."""
    group, spec = owned.reads.copy.group, owned.spec
    if type(part) is not Tensor and type(part) is not nn.Parameter:
        raise UnsupportedError(
            f"{owned.name} is read outside of its module while zero.stage: 3 has not gathered it. Read it inside of the model's "
            "forward, or set zero.stage to 1 or 2."
        )
    lengths = [spec.local_size(group.size(), rank) for rank in range(group.size())]
    moved = part.movedim(spec.dim, -1)
    padded = F.pad(moved, (0, max(lengths) - moved.shape[-1]))  # all_gather needs equal shapes on every rank
    parts = gather_over(padded, group)
    return spec.assemble([p[..., :length].movedim(-1, spec.dim) for p, length in zip(parts, lengths, strict=True)])


class _StandIn(torch.autograd.Function):
    """A `Whole` of a parameter. Readers compute alike on tensor-parallel ranks: the gradient is this rank's slice, without a sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, owned: Owned) -> Tensor:
        ctx.owned = owned
        return Whole(owned, part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return part_of_gradient(ctx.owned, grads[0]), None


def part_of_gradient(owned: Owned, gradient: Tensor) -> Tensor:
    """This rank's part of the gradient of a whole tensor; a sum over the ranks where each reads rows of its own."""
    reads, group = owned.reads, owned.reads.copy.group
    whole = sum_over(gradient, group) if reads.sums else gradient
    return owned.spec.shard(whole, group.size(), reads.tp_rank)


class Refused(Tensor):
    """Stand-in for a sharded tensor outside of every forward: its metadata, and an error for all else."""

    @staticmethod
    def __new__(cls: type[Refused], owned: Owned, part: Tensor) -> Refused:
        made: Refused = _wrapper(cls, owned, part)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with no_torch_function():
            return f"Refused({self.__dict__['tp_owned'].name}, shape={tuple(self.shape)})"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tp_part"], name)  # what somebody has attached to the parameter

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("grad", "data"):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["tp_part"], name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        read: Callable[..., Any] | None = ON_THE_PART.get(func)
        if read is not None and isinstance(args[0], Refused):
            return read(args[0].__dict__["tp_part"], *args[1:], **(kwargs or {}))
        found = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Refused))
        owned: Owned = found.__dict__["tp_owned"]
        if func == Tensor.grad.__get__ and found.__dict__["tp_part"].grad is None:  # type: ignore[union-attr]
            return None
        used = getattr(func, "__name__", str(func))
        accessor = getattr(getattr(func, "__self__", None), "__name__", "")
        return _refuse(owned, f"used ({accessor if used in ('__get__', '__set__') else used})", _reader())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Refused))
        return _refuse(found.__dict__["tp_owned"], f"used ({func})", _reader())


# Whether it is trained, and what it is called, is the same for the part.
ON_THE_PART: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad.__get__: lambda part: part.requires_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: lambda part, value: part.requires_grad_(value),  # type: ignore[attr-defined]
    Tensor.requires_grad_: lambda part, value=True: part.requires_grad_(value),
    Tensor.is_leaf.__get__: lambda part: part.is_leaf,  # type: ignore[attr-defined]
}


def _refuse(owned: Owned, what: str, reader: str) -> NoReturn:
    raise UnsupportedError(
        f"{owned.name} is {what} by {reader}, outside of the model's forward, where this rank has only its part of it (cut along "
        f"dim {owned.spec.dim}, {owned.spec.full_size} in all). Read it in the model's forward or in a Trainer's compute_loss, "
        f"which gather it; take whole weights from accelerator.get_state_dict(model) on all ranks; or set {owned.setting} to keep "
        "it whole."
    )
