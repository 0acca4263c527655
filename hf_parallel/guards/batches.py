"""Batches between the data loader and the model: changed since they were announced, or different on another rank.

A digest here is a few integer operations on the device where the batch is, so that it can be part of every step; it
rides on a message that is sent anyway. `hf_parallel.batches.digest` hashes every byte: on the first steps, and of batches that are on the CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.batches import RandomCheck, digest, refuse_unlike
from hf_parallel.compat.private_torch import version_of
from hf_parallel.guards.alike import CommonWeights, bits_of
from hf_parallel.mesh import Mesh


BITS = 52  # a digest is exact as a float64, in which losses travel
_CHUNK = 1 << 16


class Announced:
    """The tensors of one announced batch as they were then.

    Identity is not enough to tell that a batch is unchanged: labels may be masked in place. A tensor's version counts
    what was written to it, through views too; what is written through shared memory (numpy) is not counted.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = {name: value for name, value in batch.items() if value is not None}
        self._seen = {name: _state(value) for name, value in self.batch.items()}

    def is_in(self, batch: Mapping[str, Any], more: frozenset[str]) -> bool:
        """Whether `batch` is this one, unchanged, with nothing beside it but arguments named in `more`."""
        if not batch.keys() <= self.batch.keys() | more:
            return False
        return all(
            batch.get(name) is value and _state(value) == self._seen[name] for name, value in self.batch.items()
        )


def _state(value: Any) -> Any:
    """What changes when somebody writes to a value."""
    if isinstance(value, Tensor):
        return value.data_ptr(), version_of(value), value.shape
    if isinstance(value, Mapping):
        return [(key, id(item), _state(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(id(item), _state(item)) for item in value]
    return None


class Digests:
    """Makes digests of batches on the device where they are, without waiting for it."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, Tensor] = {}

    def of(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """A number below 2**52 (0-d int64) of the names, shapes, types and values of all tensors.

        Tensors that a graph made (embeddings of the tokens) are left out: ranks compute them for themselves.
        """
        named = [
            (name, batch[name])
            for batch in batches
            for name in sorted(batch)
            if isinstance(batch[name], Tensor) and not batch[name].requires_grad
        ]
        if not named:
            return torch.zeros((), dtype=torch.int64)
        if all(value.device.type == "cpu" for _, value in named):  # hashing costs less there than a dozen operations
            return torch.tensor(digest([{name: value} for name, value in named]) & ((1 << BITS) - 1))
        labels = [_label(name, value) for name, value in named]
        values = [bits_of(value) for _, value in named]
        flat = values[0] if len(values) == 1 else torch.cat([one.to(values[0].device) for one in values])
        total = self._sum(flat) + zlib.crc32(repr(labels).encode())
        return (total ^ (total >> 29)) & ((1 << BITS) - 1)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum of the values i64[n] times odd numbers, modulo 2**64: another value anywhere, or another order, changes it."""
        if values.device not in self._weights:
            generator = torch.Generator().manual_seed(0)
            numbers = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator) * 2 + 1
            self._weights[values.device] = numbers.to(values.device)
        weights = self._weights[values.device]
        while values.numel() > _CHUNK:
            padded = torch.nn.functional.pad(values, (0, -values.numel() % _CHUNK))
            values = (padded.view(-1, _CHUNK) * weights).sum(1)
        return (values * weights[: values.numel()]).sum()


class BatchDigests:
    """Digests of what the ranks of one model copy read and hold in common, on messages that are sent anyway.

    Args:
        mesh: This rank's mesh.
        common: Weights that several ranks hold.

    Attributes:
        width: Slots that a message needs.
    """

    def __init__(self, mesh: Mesh, common: CommonWeights) -> None:
        self._mesh, self._common = mesh, common
        self._digests = Digests()
        self._unread: list[Tensor] = []
        self.width = mesh.shape.mp_size * (1 + len(common.names))

    def put(self, slots: Tensor, batches: Sequence[Mapping[str, Any]]) -> None:
        """Write this rank's digests into its slots of what will be summed over the ranks; after a forward pass."""
        mine = slots.view(self._mesh.shape.mp_size, -1)[self._mesh.rank % self._mesh.shape.mp_size]
        mine[0] = self._digests.of(batches).to(slots.device)
        for slot, number in enumerate(self._common.digests(slots.device), 1):
            mine[slot] = number

    def arrived(self, slots: Tensor) -> None:
        """The slots of all ranks; on a GPU they are judged by `judge`, where a backward pass waits for the device anyway.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        self._unread.append(slots)
        if slots.device.type == "cpu" or not torch.is_grad_enabled():
            self.judge()

    def judge(self) -> None:
        """Refuse batches or common weights that differ.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        unread, self._unread = self._unread, []
        for slots in unread:
            rows = [[int(value) for value in row] for row in slots.view(self._mesh.shape.mp_size, -1).tolist()]
            refuse_unlike(self._mesh, [row[0] for row in rows])
            self._common.refuse_unlike([row[1:] for row in rows])


class SharedBatch:
    """Compares the batch of every forward pass over the ranks that share its layers; without a pipeline.

    Args:
        mesh: This rank's mesh.
        device: Where the model computes.
        common: Weights that all of these ranks hold.
        random: Random states that all of these ranks share.
    """

    def __init__(self, mesh: Mesh, device: torch.device, common: CommonWeights, random: RandomCheck) -> None:
        self._mesh, self._device, self._common, self._random = mesh, device, common, random
        self._digests = Digests()
        self._under_way: tuple[Tensor, torch.cuda.Event] | None = None

    def compare(self, batch: Mapping[str, Any], *, trains: bool = False) -> None:
        """Collective over the tensor-parallel ranks: three numbers each.

        On a GPU a batch is judged when the next one comes or the step ends (`settle`): the device has then long got to it.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        if self._mesh.tp_group is None:
            return
        word = torch.full((), self._random.word() if trains else 0, device=self._device)
        mine = torch.stack([self._digests.of([batch]).to(self._device), word, *self._common.digests(self._device)])
        values = mine.new_zeros(self._mesh.shape.tp_size, len(mine))
        values[self._mesh.tp_rank] = mine
        dist.all_reduce(values, group=self._mesh.tp_group)  # a row each: cheaper than gathering a list
        self.settle()
        if values.device.type != "cuda":
            self._judge(values)
            return
        here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        here.copy_(values, non_blocking=True)
        self._under_way = here, torch.cuda.current_stream(values.device).record_event()

    def settle(self) -> None:
        """Judge what is not judged yet; before an update.

        Raises:
            RankMismatchError: As `compare`.
        """
        before, self._under_way = self._under_way, None
        if before is not None:
            before[1].synchronize()
            self._judge(before[0])

    def _judge(self, values: Tensor) -> None:
        rows = values.tolist()
        if all(row == rows[0] for row in rows):
            return
        refuse_unlike(self._mesh, [row[0] for row in rows])
        self._random.refuse_unlike([row[1] for row in rows])
        self._common.refuse_unlike([row[2:] for row in rows])


def _label(name: str, value: Tensor) -> str:
    return f"{name}{tuple(value.shape)}{value.dtype}"
