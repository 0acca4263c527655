"""Records the tensors that enter and leave modules in a forward pass, to name the module where two passes part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hf_parallel.model.tensors import tensors_in
from hf_parallel.ulysses.whole import WholeRows


@dataclass
class Trail:
    """Tensors that entered and left the modules of one forward pass, in the order of the calls.

    Args:
        seen: (module, "enters" or "leaves") and its tensors.
        open: Modules whose forward runs.
        fed: Modules that were given something with a gradient: hidden states.
        whole: Modules whose beginnings on whole rows leave no trail.
        tables: Modules whose calls returned tensors f[... S W] of whole rows alone, without gradients, and whether all did.
        counted: Modules inside of blocks that made a range as long as the rows.
    """

    whole: WholeRows
    seen: list[tuple[str, str, list[Tensor]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    fed: set[str] = field(default_factory=set)
    tables: dict[str, bool] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)

    def outputs(self, name: str) -> list[Tensor]:
        """The one tensor of each call of a module; none if it ever returns another number of them."""
        found = [tensors for other, how, tensors in self.seen if (other, how) == (name, "leaves")]
        return [tensors[0] for tensors in found] if all(len(tensors) == 1 for tensors in found) else []


@contextmanager
def watched(model: nn.Module, trail: Trail, length: int) -> Iterator[None]:
    """Inside, calls of modules leave a trail. A recomputation does not: the loss is there by then."""
    handles: list[RemovableHandle] = []

    def enters(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if trail.whole.begins:
                return
            trail.open.append(name)
            trail.seen.append((name, "enters", _floats((args, kwargs))))
            trail.fed.update([name] if any(x.requires_grad for x in tensors_in((args, kwargs))) else ())

        return note

    def leaves(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if trail.whole.begins:
                return
            trail.open.pop()
            trail.seen.append((name, "leaves", _floats(output)))
            trail.tables[name] = trail.tables.get(name, True) and _is_table(output, length)

        return note

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(enters(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leaves(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_table(output: Any, length: int) -> bool:
    """Whether all that a module returned are numbers t[... S W] for each token that depend on no weights and no hidden states."""
    found = output if isinstance(output, (tuple, list)) else [output]
    return bool(found) and all(
        isinstance(x, Tensor) and x.ndim > 1 and x.shape[-2] == length and not x.requires_grad for x in found
    )


class Counts(TorchFunctionMode):
    """Notes where blocks make a range as long as the rows they are given, and multiplies it."""

    def __init__(self, trail: Trail, blocks: tuple[str, ...], length: int, spread: int) -> None:
        super().__init__()
        self._trail, self._blocks, self._length, self._spread = trail, blocks, length, spread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.arange or not self._trail.open or not self._trail.open[-1].startswith(self._blocks):
            return made
        if made.numel() != self._length:
            return made
        self._trail.counted.append(self._trail.open[-1])
        return made * self._spread


def _floats(values: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors_in(values) if t.is_floating_point()]
