"""Whole experts on each rank: a rank computes the tokens that are routed to its experts; the outputs are summed outside.

For modules that take hidden states, the experts chosen for each token, and their weights, and that return for each token
the weighted sum of its experts. Such a module can be called on single (token, expert) choices instead, and so on those of
this rank only. None of its code sees an expert that it does not have, whatever its implementation (a loop, a grouped
product), so no marker for absent experts is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.tensor_parallel.layout import split_units
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.shard_plan import Routing


@dataclass
class _RoutedState:
    """The experts [start, stop) of this rank; kept on the module as `tp_routed`."""

    rule: Routing
    start: int
    stop: int | None  # the last rank has what lies beyond as well: choices that mean no expert, which the module knows


def install_routing(module: nn.Module, rule: Routing, tp_size: int, tp_rank: int) -> None:
    """Let a module compute only the experts of this rank, whose parameters it holds. In place.

    Args:
        module: Takes hidden states, indices i[N K] and weights f[N K].
        rule: Arguments in which the module takes tokens and choices.
        tp_size: Number of ranks, at most that of experts.
        tp_rank: This rank.
    """
    sizes = split_units(rule.experts, tp_size, 0)
    stop = None if tp_rank == tp_size - 1 else sum(sizes[: tp_rank + 1])
    put_over(module, "tp_routed", _RoutedState(rule, sum(sizes[:tp_rank]), stop), _routed_forward)


def _routed_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's part of the sum, of the shape of the hidden states."""
    state: _RoutedState = self.tp_routed
    given: dict[str | int, Any] = dict([*enumerate(args), *kwargs.items()])
    rule = state.rule
    hidden, index, weights = given[rule.hidden], given[rule.index], given[rule.weights]
    held = index < state.stop if state.stop is not None else torch.ones_like(index, dtype=torch.bool)
    # index and weights are (tokens, top_k); n is the number of choices that are experts of this rank.
    token, choice = (held & (index >= state.start) if state.start else held).nonzero(as_tuple=True)  # (n,) each
    flat = hidden.reshape(-1, hidden.shape[-1])  # (tokens, hidden)
    given[rule.hidden] = rows = flat[token]  # (n, hidden)
    given[rule.index] = index[token, choice].unsqueeze(-1) - state.start  # (n, 1)
    given[rule.weights] = chosen = weights[token, choice].unsqueeze(-1)  # (n, 1)
    if token.numel():
        rows = self.tp_routed_inner(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
    else:  # its gradients are zero, not absent: other ranks wait for those of the inputs
        rows = rows * chosen + sum(parameter.flatten()[:0].sum() for parameter in self.parameters())
    # In one dtype on all ranks, whatever the branch: the results are summed over them.
    result: Tensor = torch.zeros_like(flat).index_add(0, token, rows.reshape(-1, flat.shape[-1]).to(flat.dtype))
    return result.reshape(hidden.shape)
