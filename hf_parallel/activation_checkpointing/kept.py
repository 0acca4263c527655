"""Keeps the arguments of a checkpointed group's blocks: containers of its own, and stand-ins for tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_parallel.activation_checkpointing.host_copies import CopyStreams, HostCopy
from hf_parallel.compat.private_torch import version_of
from hf_parallel.errors import PlanError
from hf_parallel.model.structure import Path, children, get_at, make_sequence


@dataclass(frozen=True)
class BlockOutput:
    """A tensor that block `position` of the group made: at `path` of (returned value, (args, kwargs))."""

    position: int
    path: Path


@dataclass(eq=False)
class Kept:
    """A tensor from outside the group, without its graph; once the group is left, perhaps in host memory only.

    Args:
        here: The tensor on its device; None if it is in host memory.
        version: Version of the tensor when it was kept.
        copy: Copies to host memory and back; None if it stays.
        learns: Whether it requires a gradient.
    """

    here: Tensor | None
    version: int
    copy: HostCopy | None
    learns: bool

    @staticmethod
    def of(tensor: Tensor, streams: CopyStreams | None) -> Kept:
        """Keep a tensor; with streams, those that another block computed begin to move. Parameters are there anyway."""
        here = tensor.detach()
        moves = tensor.requires_grad and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        return Kept(
            here.requires_grad_(tensor.requires_grad),
            version_of(tensor),
            HostCopy(here, streams) if moves and streams is not None else None,
            tensor.requires_grad,
        )

    @property
    def is_changed(self) -> bool:
        """Whether somebody wrote to it since; what is in host memory cannot change."""
        return self.here is not None and version_of(self.here) != self.version

    def settle(self) -> None:
        """Leave only the copy in host memory, where there is one, after the group's first run."""
        if self.copy is not None:
            self.copy.settle()
            self.here = None

    def forget(self) -> None:
        """Drop the copies of the second run, which is over."""
        if self.copy is not None:
            self.copy.forget()

    def get(self) -> Tensor:
        """The values on their device, for the second run."""
        if self.here is not None:
            return self.here
        if self.copy is None:
            raise PlanError("a tensor that was kept for the backward is neither on its device nor in host memory.")
        return self.copy.get().requires_grad_(self.learns)


def restored(results: Sequence[tuple[Any, Any]], value: Any) -> Any:
    """The arguments that were stored as `value`, with the tensors of the second run."""
    # Not a closure that calls itself: that would keep all tensors until the cycle collector runs.
    if isinstance(value, BlockOutput):
        return get_at(results[value.position], value.path)
    if isinstance(value, Kept):
        return value.get()
    return mapped(value, functools.partial(restored, results))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a container or plain object with `function` applied to its children; other values as they are.

    Empty containers are copied too: a block may fill them.
    """
    items = [(step, function(child)) for step, child in children(value)]
    if isinstance(value, (list, tuple)):
        return make_sequence(type(value), [item for _, item in items])
    if not items and not isinstance(value, Mapping):
        return value
    copied = copy.copy(value)
    for (kind, name), item in items:
        if kind == "attr":
            object.__setattr__(copied, name, item)
        else:
            copied[name] = item
    return copied
