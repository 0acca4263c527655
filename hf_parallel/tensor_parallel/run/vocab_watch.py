"""Checks that the loss function alone uses the local logits of a training forward, as planned.

A plan is verified with the arguments of its sample. Code that training alone reaches (an argument of its own, a forward
that somebody patched) may do other things to the head's output, which is a part of the vocabulary then. The first forward
with each set of arguments is watched, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_parallel.compat.torch_tools import TorchDispatchMode, pytree
from hf_parallel.head.unmade import UnmadeLogits
from hf_parallel.model.tensors import tensors_in
from hf_parallel.tensor_parallel.run.functions import TPGroup, max_over


@dataclass
class VocabMode:
    """Whether the head leaves its output local now; one object a model, kept as `tp_vocab` on model and head.

    Args:
        local: Whether the head leaves its output local.
        heads: Outputs that the head left local in the forward that runs.
        losses: Calls of the loss function in it.
        fits: Names of arguments -> whether a forward with them uses local logits for the loss function alone.
        watch: Watch of a forward that is being watched; None otherwise.
        warned: Whether the warning about a replaced loss function was given.
    """

    local: bool = False
    heads: int = 0
    losses: int = 0
    fits: dict[frozenset[str], bool] = field(default_factory=dict)
    watch: LogitsWatch | None = None
    warned: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the head's output is local."""
        self.local, self.heads, self.losses = True, 0, 0
        try:
            yield
        finally:
            self.local = False

    @property
    def is_balanced(self) -> bool:
        """Whether the loss function got what the head made, once; or neither was called."""
        return self.heads == self.losses <= 1

    def left(self, logits: Tensor) -> Tensor:
        """Note the head's local output."""
        self.heads += 1
        if self.watch is not None:
            self.watch.mark(logits)
        return logits

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Inside, the loss function reads local logits, as it may."""
        self.losses += 1
        if self.watch is None:
            yield
            return
        self.watch.allowed += 1
        try:
            yield
        finally:
            self.watch.allowed -= 1


class LogitsWatch(TorchDispatchMode):
    """Follows what is computed from local logits; see `strays`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed = 0
        self._was_read = False
        self._marked: dict[int, Tensor] = {}  # by storage, which is kept, so that no other tensor gets its address

    def mark(self, tensor: Tensor) -> None:
        """Follow `tensor`; logits that are not made from when they are."""
        if isinstance(tensor, UnmadeLogits):
            tensor.recipe.reads.on_made = self.mark
            return
        self._marked[tensor.untyped_storage().data_ptr()] = tensor

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether `tensor` was computed from local logits, other than by the loss function."""
        return type(tensor) is Tensor and tensor.untyped_storage().data_ptr() in self._marked

    def strays(self, output: Any) -> bool:
        """Whether anything of a forward's output, beside its logits, or a decision in it, came from local logits."""
        rest = {k: v for k, v in output.items() if k != "logits"} if isinstance(output, Mapping) else output
        leaves = pytree.tree_leaves(rest)
        return self._was_read or any(isinstance(leaf, Tensor) and self.is_marked(leaf) for leaf in leaves)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.allowed or not self._marked:
            return result
        given = tensors_in((args, kwargs))
        if any(self.is_marked(tensor) for tensor in given):
            made = [leaf for leaf in pytree.tree_leaves(result) if type(leaf) is Tensor]
            self._was_read |= not made
            for tensor in made:
                self.mark(tensor)
        return result


def on_all(fits: bool, device: torch.device, group: TPGroup) -> bool:
    """Whether it fits on every rank; a part may raise where another does not. One small all-reduce."""
    return not bool(max_over(torch.tensor([0.0 if fits else 1.0], device=device), group))
