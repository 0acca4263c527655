"""Weights that are not trained, of which microbatches of several optimizer steps use one version.

A microbatch that is under way has saved them. Code of users may write to them meanwhile: what it writes is nothing new where it loads or
averages all weights of a model, and otherwise would be in some passes of a microbatch and not in others. So the modules run with
parameters that share their memory and not their version counter, which autograd looks at, and values are compared after a write.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_parameters, version_of
from hf_parallel.model.tensors import as_integers


class StillWeights:
    """The weights of one rank that are not trained.

    Args:
        model: This rank's part of the model.
        parameters: Name -> parameter.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        # One of another class (quantised) is more than its memory.
        aliases = {
            id(p): nn.Parameter(p.data, requires_grad=False) for p in parameters.values() if type(p) is nn.Parameter
        }
        self._places = [
            (own_parameters(module), key, parameter, aliases[id(parameter)])
            for module in model.modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None and id(parameter) in aliases
        ]
        self._is_put = False
        self._sums: Tensor | None = None
        self._seen: list[tuple[int, int]] = []

    def put(self, *, back: bool) -> None:
        """Let the modules have what shares the weights' memory, or (`back`) the weights that everybody else knows."""
        if self._is_put is not back:
            return
        self._is_put = not back
        for table, key, parameter, alias in self._places:
            if (
                not back and parameter.data_ptr() != alias.data_ptr()
            ):  # it was given other memory while nothing was under way
                alias.data = parameter.data
            table[key] = parameter if back else alias

    def note(self) -> None:
        """Remember the values of now, with which what is written from now on is compared; a step is over."""
        now = self._now()
        if self._sums is None or now != self._seen:
            self._sums, self._seen = self._summed(), now

    def changed(self) -> str | None:
        """The name of one that has another value, or other memory, than at `note`; None if none has."""
        now = self._now()
        if now == self._seen or self._sums is None:
            return None
        sums = self._summed()
        others = [name for name, same in zip(self._parameters, (sums == self._sums).tolist(), strict=True) if not same]
        moved = [n for n, was, place in zip(self._parameters, self._seen, now, strict=True) if was[1] != place[1]]
        return next(iter([*others, *moved]), None)

    def _now(self) -> list[tuple[int, int]]:
        """Version and address of each parameter."""
        return [(version_of(parameter), parameter.data_ptr()) for parameter in self._parameters.values()]

    @torch.no_grad()
    def _summed(self) -> Tensor:
        """The sum of the bits of each weight, i64[weights]."""
        sums = [as_integers(parameter).sum(dtype=torch.int64) for parameter in self._parameters.values()]
        return torch.stack(sums) if sums else torch.zeros(0)
