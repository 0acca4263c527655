"""Weights that several ranks of one model copy hold must stay the same on all of them, whatever user code does to weights.

A tied embedding is on two stages, a norm on every tensor-parallel rank. Noise that each rank draws for its own parameters,
or an optimizer that rounds at random, would make them differ for ever. A few elements of each tell: such changes touch all
of them. Their digests are part of messages that are sent anyway; of many norms each message has some, and what differs stays so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.batches import bytes_of
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.weights.scaled_shards import ScaledShards
from hf_parallel.guards.weights.trained import BITS, TrainedWord, refuse_unlike_trained
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.model.tensors import as_integers


ELEMENTS = 64  # of a parameter
COPIES = 16  # parameters held by every tensor-parallel rank that a message is about, others than the one before
COPIED, TRAINED, SCALED = "copies", "requires_grad", "scaled"
_PLAIN = (Tensor, nn.Parameter)


class CommonWeights:
    """Digests of this rank's common weights, one slot each.

    Args:
        ledger: Ledger of the whole model.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        arriving: Whether updated parameters may be on their way, so that they cannot be looked at.
        scaled: Numbers by which user code has multiplied this rank's shards.

    Attributes:
        names: The slots: parameters that several stages hold, then one name for those that all ranks of a stage hold, one for
            which parameters these ranks train, and one for numbers that shards were multiplied by.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        arriving: Callable[[], bool],
        scaled: ScaledShards,
    ) -> None:
        self._mesh, self._arriving = mesh, arriving
        self._scaled = scaled
        self.names = [entry.name for entry in ledger if entry.kind == "param" and len(entry.holders) > 1]
        held = [[parameters[name]] if name in parameters else [] for name in self.names]
        self._slots = [Slot(parameters) for parameters in held]
        self._copies: dict[str, nn.Parameter] = {}
        self._trained: list[TrainedWord] = []
        if mesh.shape.stage_size > 1:
            self.names += [COPIED, TRAINED, SCALED]
            self._copies = {name: one for name, one in parameters.items() if ledger.entries[name].spec is None}
            self._trained.append(TrainedWord(parameters.values()))
        copies, parts = list(self._copies.values()), max(1, -(-len(self._copies) // COPIES))
        self._turns = cycle([Slot(copies[part::parts]) for part in range(parts)])

    def digests(self) -> list[Tensor | int]:
        """A number of each slot (a 0-d i64 where the weights are on a GPU): zero where this rank holds nothing.

        Without waiting for the device.
        """
        if self._arriving():
            return [0 for _ in self.names]
        common = [slot.digest() for slot in self._slots]
        if not self._trained:
            return common
        return [*common, next(self._turns).digest(), *(word.now() for word in self._trained), self._scaled.digest()]

    def refuse_unlike(self, slots: Sequence[Sequence[int]]) -> None:
        """Compare what the ranks of this model copy hold.

        Args:
            slots: Slots of each rank of the copy, in rank order.

        Raises:
            RankMismatchError: Names a parameter and the ranks that differ; on every rank.
        """
        unlike = False
        for index, name in enumerate(self.names):
            is_copy = self._mesh.shape.stage_size > 1 and index >= len(self.names) - 3
            size = self._mesh.shape.stage_size
            for one in range(len(slots) // size if is_copy else size):
                # Copies: the ranks of a stage. Else: the stages of a tensor-parallel rank.
                ranks = range(one * size, (one + 1) * size) if is_copy else range(one, len(slots), size)
                values = {rank: slots[rank][index] for rank in ranks if slots[rank][index]}
                if len(set(values.values())) > 1 and name == SCALED and is_copy:
                    unlike = True
                elif len(set(values.values())) > 1:
                    self._refuse(name, sorted(values))
        if unlike:
            self._scaled.look()

    def _refuse(self, name: str, ranks: Sequence[int]) -> None:
        names = [self._mesh.shape.describe(rank) for rank in self._mesh.copy_ranks]
        if name == TRAINED:
            refuse_unlike_trained([names[rank] for rank in ranks])
        if name == COPIED:
            name = self._unlike_copy(ranks)
        shape = self._mesh.shape
        sizes = {"pp_size": shape.pp_size, "tp_size": shape.tp_size, "sp_size": shape.sp_size}
        shared = [key for key, size in sizes.items() if size > 1]
        raise RankMismatchError(
            f"parameter {name} is held by {' and '.join(names[rank] for rank in ranks)}, and its values "
            "differ there: code between two steps changed it differently on each rank (noise drawn for one parameter after "
            "another? a learning rate set on some ranks only? statistics that a hook keeps of this rank's part of a tensor?). Draw for "
            f"each parameter with a generator seeded by its name and the step, or set {' and '.join(shared)} to 1."
        )

    def _unlike_copy(self, ranks: Sequence[int]) -> str:
        """The first parameter that differs between ranks of this copy; collective over it."""
        everyone: list[Any] = [None] * self._mesh.shape.mp_size
        mine = {name: int(Slot([parameter]).digest()) for name, parameter in self._copies.items()}
        dist.all_gather_object(everyone, mine, group=self._mesh.mp_group)
        held: list[dict[str, int]] = [everyone[rank] for rank in ranks]
        return next((name for name in held[0] if len({each.get(name) for each in held}) > 1), next(iter(held[0])))


class Slot:
    """The parameters of one slot, and views of some elements of each, which are kept while their memory is the same.

    Args:
        held: The parameters.
        num_elements: How many elements of each.
    """

    def __init__(self, held: Sequence[nn.Parameter], num_elements: int = ELEMENTS) -> None:
        self._held, self._num_elements = held, num_elements
        self._places: list[int] | None = None
        self._views: list[Tensor] = []
        self._weights = torch.zeros(0, dtype=torch.int64)

    def digest(self) -> Tensor | int:
        """A number (a 0-d i64 where the weights are on a GPU): zero if nothing is held, else never zero."""
        if not self._held:
            return 0
        places = [parameter.data_ptr() if type(parameter) in _PLAIN else 0 for parameter in self._held]
        if places != self._places:
            self._look(places)
        if not self._views:
            return 1
        return digest_of(torch.cat(self._views), self._weights)

    def _look(self, places: list[int]) -> None:
        self._places = places
        found = (_some(parameter, self._num_elements) for parameter in self._held)
        self._views = [view for view in found if view is not None]
        if self._views:
            self._weights = factors(sum(map(len, self._views)), self._views[0].device)


def _some(parameter: nn.Parameter, count: int) -> Tensor | None:
    """A view of some elements [<= count]; None of a kind whose memory cannot be read so."""
    values = parameter.detach()
    if type(values) not in _PLAIN or not values.numel() or not values.is_contiguous():
        return None
    flat = values.view(-1)
    return flat[:: max(1, len(flat) // count)][:count]


def factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers i64[count], the same on every rank, by which `digest_of` tells places apart."""
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(1))
    return (numbers * 2 + 1).to(device)


def digest_of(some: Tensor, weights: Tensor) -> Tensor | int:
    """A number for the bits of a tensor [N], never zero: a 0-d i64 of one on a GPU, without waiting for it."""
    if some.device.type == "cpu":  # hashing costs less there than a dozen operations
        state = hashlib.blake2b(bytes_of(some), digest_size=8)
        return int.from_bytes(state.digest(), "big") & ((1 << BITS) - 1) | 1
    total = (bits_of(some) * weights).sum()
    return ((total ^ (total >> 23)) & ((1 << BITS) - 1)) | 1


def bits_of(value: Tensor) -> Tensor:
    """The bits of a tensor as int64, in one dimension."""
    return as_integers(value).to(torch.int64)
