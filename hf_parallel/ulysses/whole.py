"""Tables of positions that see whole rows, where the rest of the model runs on this rank's part.

A model that counts positions itself, by the shape of its ids, by their padding or by a mask, counts those of a part. What it counts
are integers that enter small modules before the first block. So the model begins on whole rows, without gradients and no further than
into these modules; then it runs on its part, where they get the integers of whole rows, and this rank keeps its part of their output.

Extents: B batch, S sequence, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.model.stack import candidate_stacks


class Enough(BaseException):
    """Ends a forward that has begun. Not an Exception, so that model code cannot swallow it."""


@dataclass(frozen=True)
class Place:
    """How a module sees whole rows.

    Args:
        calls: Of one forward.
        dim: Of its output, along the sequence.
    """

    calls: int
    dim: int


Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class WholeRows:
    """The modules of one model that see whole rows.

    Args:
        places: By name.
    """

    places: dict[str, Place] = field(default_factory=dict)
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
            given: What it is called with; labels are not needed.
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
            self._cut, self._given = None, {}

    def install(self, model: nn.Module) -> Callable[[], None]:
        """Let the modules of `model` see whole rows. In place; returns what undoes it."""
        handles = []
        for name, place in self.places.items():
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._enters(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaves(place.dim), prepend=True))

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


def may_see_whole_rows(model: nn.Module) -> list[str]:
    """Modules before and behind the blocks that have no children: a recomputed one would see the rows of another batch."""
    try:
        stacks = tuple(f"{name}." for name in candidate_stacks(model))
    except PlanError:
        stacks = ()
    return [
        name
        for name, module in model.named_modules()
        if name and not name.startswith(stacks) and next(module.children(), None) is None
    ]
