"""Gradients of a schedule that has run in a forward call, kept apart until the loss of that call is backpropagated.

A fused step makes its gradients before upstream code has said what the loss is multiplied with, and before it is known
whether the loss is backpropagated at all. Until then they are not in `p.grad`, where gradients of other losses are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import add_all, scale_all
from hf_parallel.errors import UnsupportedError


class _Kept:
    """Stands for what autograd keeps of a graph: it is gone when a backward pass has let go of the graph."""


class Made:
    """The gradients of one schedule, as they are for the loss times what it was seeded with."""

    def __init__(self) -> None:
        self._gradients: list[tuple[nn.Parameter, Tensor]] | None = []
        self._graph: weakref.ref[_Kept] | None = None

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Around the call that makes the graph of the loss, which saves a tensor there."""

        def pack(tensor: Tensor) -> tuple[Tensor, _Kept]:
            kept = _Kept()
            self._graph = weakref.ref(kept)
            return tensor, kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
            yield

    @property
    def may_follow(self) -> bool:
        """Whether the last backward pass has kept the graph (`retain_graph=True`), so that there may be another one."""
        return self._graph is not None and self._graph() is not None

    @property
    def is_taken(self) -> bool:
        """Whether they were given away for good."""
        return self._gradients is None

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over the gradients that the parameters have."""
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def take(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The gradients: copies after a backward pass that has kept the graph, else once and for all.

        Raises:
            UnsupportedError: They were given away before.
        """
        gradients = self._gradients
        if gradients is not None and self.may_follow:
            return [(parameter, gradient.clone()) for parameter, gradient in gradients]
        self._gradients = None
        if gradients is None:
            raise UnsupportedError(
                "the loss of one training forward was backpropagated twice with pp_size above 1: a fused pipeline step "
                "keeps no graph, and its gradients were added up the first time. Pass retain_graph=True the first time, add "
                "the losses up before one backward, or call the model again."
            )
        return gradients


@contextmanager
def apart(parameters: Sequence[nn.Parameter]) -> Iterator[Made]:
    """Inside, the parameters have no gradients; afterwards they have those from before, and those made inside are held.

    Args:
        parameters: Parameters of this rank.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    made = Made()
    try:
        yield made
        made.hold(parameters)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def together(passed: Sequence[tuple[Made, Tensor]]) -> list[tuple[Made, Tensor]]:
    """Gradients that one backward pass asked for more than once, each with the sum of its factors (0-d)."""
    sums: dict[int, tuple[Made, Tensor]] = {}
    for made, factor in passed:
        sums[id(made)] = made, factor + sums[id(made)][1] if id(made) in sums else factor
    return list(sums.values())


@torch.no_grad()
def add(gradients: Sequence[tuple[nn.Parameter, Tensor]], factor: Tensor) -> None:
    """Add `factor` times the gradients to those that the parameters have; consumes them.

    Args:
        gradients: Gradients with their parameters.
        factor: A number on their device (0-d), not read here.
    """
    if not gradients:
        return
    scale_all([gradient for _, gradient in gradients], factor.to(gradients[0][1].device))
    accumulate(gradients)


@torch.no_grad()
def accumulate(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Add gradients, one of each parameter, to those that the parameters have; consumes them."""
    both = [(parameter.grad, gradient) for parameter, gradient in gradients if parameter.grad is not None]
    if both:
        add_all([there for there, _ in both], [gradient for _, gradient in both])
    for parameter, gradient in gradients:
        if parameter.grad is None:
            parameter.grad = gradient
