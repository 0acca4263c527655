"""Giving the head of a model logits that are made when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_parameters, version_of
from hf_parallel.compat.torch_tools import autocast_dtype
from hf_parallel.head.tiles import Head, Tiling
from hf_parallel.head.unmade import Reads, Recipe, UnmadeLogits, unmade


@dataclass
class LogitsDeferral:
    """Decides for one head whether its logits are made; kept on the module as `logits_deferral`.

    Args:
        tiling: Tiling with which its losses are computed.
        last: Use of the logits of its last forward.
    """

    tiling: Tiling
    last: Reads = field(default_factory=lambda: Reads(version=0))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Logits f[... V] of `hidden` f[... H], not made; None where the head has to make them.

        That is without a graph, and where all tokens are those of one tile: a loss without logits would save nothing.

        Args:
            hidden: Input of the head.
            weight: p[V H].
            bias: p[V] or None.
        """
        if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
            return None
        tokens = math.prod(hidden.shape[:-1])
        if not self.tiling.rows and tokens <= self.tiling.rows_of(tokens, hidden.shape[-1], weight.shape[0]):
            return None
        dtype = autocast_dtype(hidden)
        if dtype is None and weight.dtype != hidden.dtype:
            return None  # the layer's own forward says what is wrong
        self.last = Reads(version_of(weight))
        return unmade(Recipe(hidden, Head(weight, bias, dtype or hidden.dtype, (), self.tiling), self.last))


def defer_logits(head: nn.Module) -> None:
    """Make a head, a linear layer, return logits that are computed when read, while gradients are recorded. In place."""
    if "logits_deferral" not in vars(head):  # of an earlier training
        vars(head)["logits_deferral_inner"] = head.forward
    vars(head)["logits_deferral"] = LogitsDeferral(Tiling())
    vars(head)["forward"] = MethodType(_deferred_forward, head)


def made(logits: Tensor) -> Tensor:
    """Logits as an ordinary tensor."""
    return logits.made() if isinstance(logits, UnmadeLogits) else logits


def _deferred_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    hidden = args[0] if args else next(iter(named.values()))
    parameters = own_parameters(self)
    found = self.logits_deferral.logits(hidden, parameters["weight"], parameters.get("bias"))
    result: Tensor = self.logits_deferral_inner(*args, **named) if found is None else found
    return result
