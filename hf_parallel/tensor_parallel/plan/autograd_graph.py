"""Ways back through the autograd graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor


T = TypeVar("T")


def met_first(tensors: Iterable[Tensor], known: Mapping[Any, T], ends: Collection[Any] = ()) -> frozenset[T]:
    """Go back from `tensors` through the autograd graph, and collect the `known` value of the first known node on every way.

    Args:
        tensors: Tensors at which the ways begin.
        known: Node -> what it stands for.
        ends: Nodes at which a way ends with nothing.
    """
    found, seen = set(), set(ends)
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in known:
            found.add(known[node])
        else:
            pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return frozenset(found)
