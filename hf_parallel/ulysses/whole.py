"""Tables of positions that see whole rows, where the rest of the model runs on this rank's part.

A model that counts positions itself, by the shape of its ids, by their padding or by a mask, counts those of a part. What it counts
are integers that enter small modules before the first block. So the model begins on whole rows, without gradients and no further than
into these modules; then it runs on its part, where they get the integers of whole rows, and this rank keeps its part of their output.

A module that makes numbers of the positions alone (rotary embeddings) may choose them by the last position of the row: longrope has other
frequencies from some length on, a dynamic one changes them as rows grow. So each gets the positions of whole rows.

Extents: B batch, S sequence, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import id_of_storage
from hf_parallel.errors import PlanError
from hf_parallel.model.stack import candidate_stacks
from hf_parallel.model.tensors import tensors_in


class Enough(BaseException):
    """Ends a forward that has begun. Not an Exception, so that model code cannot swallow it."""


@dataclass(frozen=True)
class Place:
    """Calls of a module that must see whole rows, and the dim of its output that is the sequence.

    Args:
        calls: Calls of the module in one forward.
        dim: Dim of its output along the sequence.
    """

    calls: int
    dim: int


Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class WholeRows:
    """The modules of one model that see whole rows.

    Args:
        places: By name.
        tables: Names of those without weights that make numbers of positions: they see those of whole rows.
        positions: Positions of this rank's part, and of whole rows, i[... S]; while the model runs on a part.
    """

    places: dict[str, Place] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    positions: tuple[Tensor, Tensor] | None = None
    _given: dict[str, list[Given]] = field(default_factory=dict)
    _cut: Callable[[Tensor, int], Tensor] | None = None
    _begins: bool = False

    @property
    def begins(self) -> bool:
        """Whether the model runs on whole rows to see what it counts: masks are not needed then."""
        return self._begins

    def begin(self, forward: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """Run `forward` on whole rows up to the last call of a module that sees them.

        Args:
            forward: The model's own.
            given: Arguments of its call; labels are not needed.
        """
        self._given = {name: [] for name in self.places}
        if not self.places:
            return
        self._begins = True
        try:
            with torch.no_grad():
                forward(**given)
        except Enough as stop:
            stop.__traceback__ = stop.__context__ = None
        finally:
            self._begins = False

    @contextmanager
    def seen(self, cut: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
        """Inside, the modules get what `begin` saw; `cut` gives this rank's part of a tensor along a dim."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut, self._given, self.positions = None, {}, None

    def install(self, model: nn.Module) -> Callable[[], None]:
        """Let the modules of `model` see whole rows. In place; returns what undoes it."""
        handles = []
        for name, place in self.places.items():
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._enters(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaves(place.dim), prepend=True))
        for name in self.tables:
            module, is_whole = model.get_submodule(name), [False]
            handles.append(module.register_forward_pre_hook(self._enters_table(is_whole), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaves_table(is_whole), prepend=True))

        def restore() -> None:
            for handle in handles:
                handle.remove()

        return restore

    def _enters(self, name: str) -> Callable[..., Given | None]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
            if self._begins:
                self._given[name].append((args, kwargs))
                if all(len(self._given[other]) >= place.calls for other, place in self.places.items()):
                    raise Enough
            elif self._cut is not None:
                return self._given[name].pop(0)
            return None

        return see

    def _leaves(self, dim: int) -> Callable[..., Tensor | None]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            return None if self._cut is None else self._cut(output, dim)

        return keep

    def _enters_table(self, is_whole: list[bool]) -> Callable[..., Given]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
            whole = [self._of_whole_rows(x) for x in (*args, *kwargs.values())]
            is_whole[0] = any(x is not None for x in whole)
            given = [x if y is None else y for x, y in zip((*args, *kwargs.values()), whole, strict=True)]
            return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

        return see

    def _of_whole_rows(self, x: Any) -> Tensor | None:
        """The positions of whole rows, if `x` is those of the part (or a view of all of them); None for anything else."""
        if self._cut is None or self.positions is None or not isinstance(x, Tensor):
            return None
        local, whole = self.positions
        if x is local:
            return whole
        same = id_of_storage(x.untyped_storage()) == id_of_storage(local.untyped_storage())
        is_view = same and x.shape[-1:] == local.shape[-1:] and x.ndim >= local.ndim == 2
        return whole.expand(*x.shape[:-1], whole.shape[-1]) if is_view else None

    def _leaves_table(self, is_whole: list[bool]) -> Callable[..., Any]:
        def keep(module: nn.Module, args: Any, output: Any) -> Any:
            if not is_whole[0] or self._cut is None:
                return None
            kept = [self._cut(x, x.ndim - 2) for x in tensors_in(output)]
            return kept[0] if isinstance(output, Tensor) else tuple(kept)

        return keep


def may_see_whole_rows(model: nn.Module) -> list[str]:
    """Modules before and behind the blocks that have no children: a recomputed one would see the rows of another batch."""
    stacks = blocks_of(model)
    return [
        name
        for name, module in model.named_modules()
        if name and not name.startswith(stacks) and next(module.children(), None) is None
    ]


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of the names of all that is inside of blocks."""
    try:
        return tuple(f"{name}." for name in candidate_stacks(model))
    except PlanError:
        return ()
