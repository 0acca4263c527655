"""Autograd nodes of what a schedule returns: their backward calls the engine with the gradient that upstream code gave.

Extents: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


OnBackward: TypeAlias = Callable[[Tensor], None]
OnBackwards: TypeAlias = Callable[[dict[str, Tensor]], None]


def loss_node(anchor: Tensor, loss: Tensor, on_backward: OnBackward, *, keeps_graph: bool) -> Tensor:
    """A loss (0-d) whose backward has already run inside the schedule.

    Args:
        anchor: A leaf (0-d) that requires a gradient, so that there is a graph; it gets zero.
        loss: The values.
        on_backward: Called with what upstream code multiplied the loss with (0-d).
        keeps_graph: Whether the node saves a tensor, by which it can be noticed that the graph was let go.
    """
    found: Tensor = _Loss.apply(anchor, loss, on_backward, keeps_graph)  # type: ignore[no-untyped-call]
    return found


def logits_node(anchor: Tensor, logits: Tensor, on_backward: OnBackward) -> Tensor:
    """Logits f[B S V] whose backward runs back through the pipeline.

    Args:
        anchor: Anchor, as in `loss_node`.
        logits: The values.
        on_backward: Called with their gradient f[B S V], with autograd switched on.
    """
    found: Tensor = _Logits.apply(anchor, logits, on_backward)  # type: ignore[no-untyped-call]
    return found


def outputs_node(anchor: Tensor, values: Mapping[str, Tensor], on_backward: OnBackwards) -> dict[str, Tensor]:
    """Outputs whose common backward runs the pipeline.

    Args:
        anchor: Anchor, as in `loss_node`.
        values: Tensors of floating point by name.
        on_backward: Called with the gradients of those that the loss depends on, with autograd switched on.
    """
    if not values:
        return {}
    found: Sequence[Tensor] = _Outputs.apply(anchor, tuple(values), on_backward, *values.values())  # type: ignore[no-untyped-call]
    return dict(zip(values, found, strict=True))


def depends_only_on(value: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether every way from `value` back through its graph to a leaf passes one of `sources`."""
    stops = {tuple(get_gradient_edge(source))[:2] for source in sources}
    start = get_gradient_edge(value)
    if tuple(start)[:2] in stops:
        return True
    to_visit, visited = [start.node], {start.node}
    while to_visit:
        node = to_visit.pop()
        if not node.next_functions:  # a leaf
            return False
        for following, index in node.next_functions:
            if following is None or (following, index) in stops or following in visited:
                continue
            visited.add(following)
            to_visit.append(following)
    return True


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, on_backward: OnBackward, keeps_graph: bool) -> Tensor:
        ctx.on_backward = on_backward
        if keeps_graph:
            ctx.save_for_backward(anchor)  # kept as long as the graph is
        return loss.clone()  # callers scale it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.on_backward(gradients[0])
        return torch.zeros_like(gradients[0]), None, None, None


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor, on_backward: OnBackward) -> Tensor:
        ctx.on_backward = on_backward
        ctx.mark_dirty(logits)  # so that it is no view of an input: callers scale and mask logits in place
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():  # off in a backward pass, and stages run theirs inside
            ctx.on_backward(gradients[0])
        return torch.zeros((), device=gradients[0].device), None, None


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, names: tuple[str, ...], on_backward: OnBackwards, *values: Tensor) -> Any:
        ctx.names, ctx.on_backward = names, on_backward
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given = {name: one for name, one in zip(ctx.names, gradients, strict=True) if one is not None}
        if given:
            with torch.enable_grad():  # as of logits
                ctx.on_backward(given)
        return None, None, None, *(None for _ in gradients)
