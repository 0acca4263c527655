"""Weights of several optimizer steps side by side, for microbatches that run forward and backward with those of one step.

Each version is a set of leaf parameters with memory of its own. A version is put in place by exchanging the parameters that the
modules have: before every forward, and before every backward, because recomputation reads them again. The newest
version shares its memory with the parameters that everybody else knows (optimizer, checkpoints, user code); before an
optimizer writes to them they move on to the memory of a version that no microbatch needs any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_parameters, version_of
from hf_parallel.compat.torch_tools import copy_all
from hf_parallel.errors import UnsupportedError


class FlatBuffer(Protocol):
    """A buffer that holds parameters, whose places in it must stay (ZeRO 1)."""

    @property
    def flat(self) -> Tensor:
        """The buffer."""

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """Its parameters."""

    def places(self, flat: Tensor) -> list[Tensor]:
        """Views of another buffer with its layout, one where each parameter would be."""

    def move_to(self, flat: Tensor) -> None:
        """Let the parameters have the memory of another buffer of its layout, with the values that they have now."""


class WeightVersions:
    """The versions of one rank's weights.

    Args:
        model: This rank's part of the model.
        parameters: Name -> parameter.
        delay: By how many updates the oldest version that is needed is older than the newest.

    Attributes:
        recent: Index of the version after each of the last updates, the newest last; the first updates have made none yet.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], delay: int) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._positions = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        self._places = [
            (own_parameters(module), key, self._positions[id(parameter)])
            for module in model.modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None and id(parameter) in self._positions
        ]
        self._sets = [[nn.Parameter(p.data, p.requires_grad) for p in self._parameters]]
        self._sets += [
            [nn.Parameter(torch.empty_like(p.data), p.requires_grad) for p in self._parameters] for _ in range(delay)
        ]
        self.recent: deque[int] = deque([0] * (delay + 1), maxlen=delay + 1)
        self._in_place: int | None = None
        self._buffers: list[tuple[FlatBuffer, list[Tensor]]] = []  # and what each version has in its place
        self._lone = list(range(len(self._parameters)))  # positions of those in no buffer

    def lie_in(self, buffers: Sequence[FlatBuffer]) -> None:
        """Move the weights of each version into buffers, as the parameters were moved there."""
        newest = self.recent[-1]
        for buffer in buffers:
            flats = [
                buffer.flat if version == newest else torch.zeros_like(buffer.flat)
                for version in range(len(self._sets))
            ]
            self._buffers.append((buffer, flats))
            for leaves, flat in zip(self._sets, flats, strict=True):
                for parameter, place in zip(buffer.params, buffer.places(flat), strict=True):
                    if id(parameter) not in self._positions:
                        continue  # an optimizer may have parameters that are not trained
                    leaf = leaves[self._positions[id(parameter)]]
                    if flat is not buffer.flat:
                        place.copy_(leaf.data)
                    leaf.data = place
        held = {id(parameter) for buffer in buffers for parameter in buffer.params}
        self._lone = [position for position in self._lone if id(self._parameters[position]) not in held]

    def put(self, version: int | None) -> None:
        """Let the modules have the weights of a version; None is what everybody else knows."""
        if version == self._in_place:
            return
        self._in_place = version
        found = self._parameters if version is None else self._sets[version]
        for table, key, position in self._places:
            table[key] = found[position]

    @property
    def written(self) -> list[int]:
        """Count of writes to each parameter, other than by `advance`."""
        return [version_of(parameter) for parameter in self._parameters]

    def follow(self) -> None:
        """Give back their memory to weights to which user code gave other memory since the last step."""
        newest = self._sets[self.recent[-1]]
        for parameter, leaf in zip(self._parameters, newest, strict=True):
            if parameter.data_ptr() != leaf.data_ptr():
                leaf.data.copy_(parameter.data)
                parameter.data = leaf.data

    @torch.no_grad()
    def advance(self) -> None:
        """Move the parameters to free memory, with the values that they have, before an optimizer writes."""
        free = next(version for version in range(len(self._sets)) if version not in list(self.recent)[1:])
        if free != self.recent[-1]:  # without a delay nothing is under way
            self._move(free)
        self.recent.append(free)

    def _move(self, version: int) -> None:
        """Move the parameters to the memory of a version, with the values that they have."""
        pairs = [(self._parameters[position], self._sets[version][position].data) for position in self._lone]
        if pairs:
            copy_all([target for _, target in pairs], [parameter.data for parameter, _ in pairs])
        for parameter, target in pairs:
            parameter.data = target
        for buffer, flats in self._buffers:
            buffer.move_to(flats[version])

    def leaves(self, version: int) -> dict[str, nn.Parameter]:
        """Name -> the parameter of a version, whose gradient is that of the microbatches that ran with it."""
        return dict(zip(self._names, self._sets[version], strict=True))

    def take_gradients(self, version: int) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters and the gradients that backward passes of a version have made, which it has no more.

        Raises:
            UnsupportedError: One went to the parameter itself: some code has read it past its module.
        """
        found = []
        for name, parameter, leaf in zip(self._names, self._parameters, self._sets[version], strict=True):
            if leaf.grad is not None:
                found.append((parameter, leaf.grad))
                leaf.grad = None
            elif parameter.grad is not None and parameter.requires_grad:
                raise UnsupportedError(
                    f"{name} was read past the module that has it, so that an asynchronous pipeline.schedule cannot give it the "
                    "weights of another step. Set pipeline.schedule to 1f1b."
                )
        return found

    def older(self) -> list[dict[str, Tensor]]:
        """The weights by name of every version that is needed beside the newest, the oldest first; for a checkpoint."""
        return [{name: leaf.data for name, leaf in self.leaves(version).items()} for version in list(self.recent)[:-1]]

    @torch.no_grad()
    def restore(self, older: list[dict[str, Tensor]]) -> None:
        """Take up what `older` gave, beside the parameters as they are now.

        None: all versions begin with those, as they are when the first microbatch runs.
        """
        if not older:
            self.recent = deque([self.recent[-1]] * len(self._sets), maxlen=len(self._sets))
            return
        self.recent = deque(range(len(self._sets)), maxlen=len(self._sets))
        self._move(self.recent[-1])
        for version, weights in enumerate(older):
            for name, leaf in self.leaves(version).items():
                leaf.data.copy_(weights[name])
