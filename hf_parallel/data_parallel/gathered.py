"""Gradients of parameters that `fully_shard` leaves gathered between a forward pass and its backward pass.

User code that clears, scales or assigns gradients there finds the gathered parameters in the model, while what earlier
passes left is the gradient of this rank's parts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_parallel.compat.private_fsdp import HookCarrier


OWN: Any = Tensor.grad  # the property of torch


class GatheredParameter(nn.Parameter):
    """A parameter that stays gathered until the backward pass: its gradient so far is that of its part, and goes with it."""

    @property
    def grad(self) -> Tensor | None:
        """Gradient of this rank's part, as between steps, unless user code has assigned another one since."""
        assigned: Tensor | None = OWN.__get__(self)
        part: Tensor | None = vars(self).get("_part")  # a copy of this one has none
        return part.grad if assigned is None and part is not None else assigned

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        part: Tensor | None = vars(self).get("_part")
        kept = part is not None and isinstance(new, DTensor)
        if part is not None:
            part.grad = new if kept else None
        OWN.__set__(self, None if kept else new)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class Gathered:
    """Gives gathered parameters the gradients of their parts, while user code may see them.

    Args:
        carrier: Knows the parameters that `fully_shard` made.
    """

    def __init__(self, carrier: HookCarrier) -> None:
        self._carrier = carrier
        self._stay: list[nn.Parameter] | None = None  # the same after every forward pass

    def show(self) -> None:
        """Let gathered parameters show the gradients of their parts, after a forward pass with a backward pass to come."""
        if self._stay is None:
            pairs = [(p, part) for p, part in self._carrier.gathered() if type(p) is nn.Parameter]
            for parameter, part in pairs:
                vars(parameter)["_part"] = part
            self._stay = [parameter for parameter, _ in pairs]
        for parameter in self._stay:
            parameter.__class__ = GatheredParameter

    def hide(self) -> None:
        """Let gathered parameters have gradients of their own, as a pass begins."""
        for parameter in self._stay or ():
            parameter.__class__ = nn.Parameter
