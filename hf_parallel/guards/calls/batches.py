"""Batches between the data loader and the model: changed since they were announced, or different on another rank.

A digest here is a few integer operations on the device where the batch is, so that it can be part of every step and
of a message that is sent anyway. Of batches on the CPU every byte is hashed.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.batches import RandomCheck, bytes_of, refuse_unlike
from hf_parallel.compat.private_torch import version_of
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.awaited import on_its_way
from hf_parallel.guards.gradients.numbers import NumbersOfShards
from hf_parallel.guards.optimizers.settings import Known, OptimizerSettings
from hf_parallel.guards.weights.alike import CommonWeights, bits_of
from hf_parallel.mesh.groups import Mesh


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
    """A fingerprint of a value that changes when somebody writes to it."""
    if isinstance(value, Tensor):
        return value.data_ptr(), version_of(value), value.shape
    if isinstance(value, Mapping):
        return [(key, id(item), _state(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(id(item), _state(item)) for item in value]
    return None


class Digests:
    """Makes digests of batches on the device where they are, without waiting for it.

    Attributes:
        labels: Name, shape and type of each tensor of the last.
    """

    def __init__(self) -> None:
        self._weights: dict[torch.device, Tensor] = {}
        self.labels: list[Any] = []
        self._begun: tuple[list[Any], Any] = [], hashlib.blake2b(digest_size=8)  # labels, and a hash that has them

    def of(self, batches: Sequence[Mapping[str, Any]]) -> Tensor | int:
        """A number below 2**52 (a 0-d int64 where a GPU has the batch) of names, shapes, types and values of all tensors.

        Tensors that a graph made (embeddings of the tokens) are left out: ranks compute them for themselves.
        """
        named = [
            (name, batch[name])
            for batch in batches
            for name in sorted(batch)
            if isinstance(batch[name], Tensor) and not batch[name].requires_grad
        ]
        self.labels = [(name, value.shape, value.dtype) for name, value in named]
        if not named:
            return 0
        if all(value.is_cpu for _, value in named):  # hashing costs less there than a dozen operations
            return self._hash([value for _, value in named])
        values = [bits_of(value) for _, value in named]
        flat = values[0] if len(values) == 1 else torch.cat([one.to(values[0].device) for one in values])
        total = self._sum(flat) + zlib.crc32(repr(self.labels).encode())
        return (total ^ (total >> 29)) & ((1 << BITS) - 1)

    def _hash(self, values: Sequence[Tensor]) -> int:
        if self._begun[0] != self.labels:
            self._begun = self.labels, hashlib.blake2b(repr(self.labels).encode(), digest_size=8)
        state = self._begun[1].copy()
        for value in values:
            state.update(bytes_of(value))
        return int.from_bytes(state.digest(), "big") & ((1 << BITS) - 1)

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
        settings: Settings of this rank's optimizers.
        numbers: Numbers that shards of gradients were changed by.

    Attributes:
        width: Slots that a message needs.
    """

    def __init__(
        self, mesh: Mesh, common: CommonWeights, settings: OptimizerSettings, numbers: NumbersOfShards
    ) -> None:
        self._mesh, self._common, self._settings, self._numbers = mesh, common, settings, numbers
        self._digests = Digests()
        self._unread: list[tuple[Tensor, Known | None]] = []
        self.width = mesh.shape.mp_size * (3 + len(common.names))

    def put(self, slots: Tensor, batches: Sequence[Mapping[str, Any]], known: Known | None = None) -> None:
        """Write this rank's digests into its slots of what will be summed over the ranks; after a forward pass.

        Args:
            slots: Slots of all ranks.
            batches: Batches that this rank has read.
            known: Facts about the optimizers, if they differ from those known now; else None.
        """
        mine = slots.view(self._mesh.shape.mp_size, -1)[self._mesh.place_in_copy]
        words = [self._settings.word(known), self._numbers.word()]
        _write(mine, [self._digests.of(batches), *words, *self._common.digests()])

    def arrived(self, slots: Tensor, known: Known | None = None) -> None:
        """Take the slots of all ranks.

        On a GPU `judge` looks at them, where a backward pass waits for the device anyway.

        Args:
            slots: Slots of all ranks.
            known: The same as was given to `put`.

        Raises:
            RankMismatchError: Raised on every rank; names the ranks that differ.
        """
        self._unread.append((slots, known))
        if slots.device.type == "cpu" or not torch.is_grad_enabled():
            self.judge()

    def judge(self) -> None:
        """Refuse batches or common weights that differ.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        unread, self._unread = self._unread, []
        for slots, known in unread:
            rows = [[int(value) for value in row] for row in slots.view(self._mesh.shape.mp_size, -1).tolist()]
            refuse_unlike(self._mesh, [row[0] for row in rows])
            self._settings.refuse_unlike([row[1] for row in rows], known)
            self._numbers.refuse_unlike([row[2] for row in rows])
            self._common.refuse_unlike([row[3:] for row in rows])


class SharedBatch:
    """Compares the batch of every forward pass over the ranks that share its layers; without a pipeline.

    The message travels while the model computes. Ranks with batches of other shapes would wait for each other in layers: a
    rank whose shapes are not those of the batch before waits for the others' digests first, and leaves if they differ.
    Then the layers of the rest fail, which looks at the digests as well.

    Args:
        mesh: This rank's mesh.
        device: Device of the model.
        common: Weights that all of these ranks hold.
        random: Random states that all of these ranks share.
        settings: Settings of this rank's optimizers.
        numbers: Numbers that shards of gradients were changed by.
        leave: Called with what this rank raises while others wait for it in a layer.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        common: CommonWeights,
        random: RandomCheck,
        settings: OptimizerSettings,
        numbers: NumbersOfShards,
        leave: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._mesh, self._device, self._common, self._random = mesh, device, common, random
        self._settings, self._numbers = settings, numbers
        self._leave = leave
        self._digests = Digests()
        self._shapes: list[Any] = []  # of the batch before, which was the same on all of these ranks
        self._looked = True
        self._under_way: tuple[Tensor, dist.Work | torch.cuda.Event] | None = None
        self._size, self._rank = mesh.shape.stage_size, mesh.rank % mesh.shape.stage_size
        self._message = torch.empty(self._size, 0, dtype=torch.int64)
        self._cells = self._message.numpy()

    def begin(self, batch: Mapping[str, Any], *, trains: bool = False, looks: bool = True) -> None:
        """Compare, before a forward pass, what the ranks of a stage read and hold; collective over them: six numbers each.

        Args:
            batch: Arguments of the call of the model.
            trains: Whether it is a training forward pass, which may draw random numbers.
            looks: Whether to look at the common weights and the optimizers too: in the first and the last pass of a step at least.

        Raises:
            RankMismatchError: On every rank, naming those that differ; for a pass that is not judged yet, too.
        """
        if self._mesh.mp_group is None:
            return
        self.settle()
        self._looked = looks
        word = self._random.word() if trains else 0
        self._compare([self._digests.of([batch]), word, *self._weights()], self._digests.labels)

    def _weights(self) -> Sequence[Tensor | int]:
        """Digests of the optimizers' settings, of numbers that gradients were changed by and of the common weights.

        Weights differ where settings did.
        """
        if not self._looked:  # hooks on gradients wait for those of the other ranks in this very pass
            return [self._settings.word() if self._settings.hooked else 0, 0, *(0 for _ in self._common.names)]
        return [self._settings.word(), self._numbers.word(), *self._common.digests()]

    def _compare(self, numbers: Sequence[Tensor | int], shapes: list[Any]) -> None:
        size, rank, group = self._size, self._rank, self._mesh.mp_group
        waits = shapes != self._shapes  # for the others, before it runs the model
        numbers = [*numbers, int(waits)]
        if self._device.type == "cuda":
            values = torch.zeros(size, len(numbers), dtype=torch.int64, device=self._device)
            _write(values[rank], numbers)
            dist.all_reduce(values, group=group)  # a row each: cheaper than gathering a list
            self._under_way = on_its_way(values)
            return
        if self._message.shape[1] != len(numbers):
            self._message = torch.empty(size, len(numbers), dtype=torch.int64)
            self._cells = self._message.numpy()  # writing there costs less than making a tensor
        values = self._message  # the one before has arrived
        self._cells.fill(0)
        self._cells[rank] = numbers
        if not waits:
            self._under_way = values, dist.all_reduce(values, group=group, async_op=True)
            return
        dist.all_reduce(values, group=group)
        try:
            self._judge(values)
        except RankMismatchError as error:
            if not values[:, -1].all():
                self._leave(str(error))
            raise
        self._shapes = shapes

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Around the forward pass itself. What a GPU computes is judged when the next one comes or the step ends.

        The device has then long got to it.

        Raises:
            RankMismatchError: For the reasons of `begin`.
        """
        try:
            yield
        except Exception:
            message = self._under_way[1] if self._under_way is not None else None
            if isinstance(message, dist.Work) and message.is_completed():
                self.settle()
            raise
        if self._device.type != "cuda":
            self.settle()

    def end_step(self) -> None:
        """Compare once more before gradients are reduced; collective if the step's last pass did not look at common weights.

        Raises:
            RankMismatchError: For the reasons of `begin`.
        """
        self.settle()
        if not self._looked:
            self._looked = True
            self._compare([0, 0, *self._weights()], [])
            self.settle()

    def settle(self) -> None:
        """Judge what is not judged yet; before an update.

        Raises:
            RankMismatchError: For the reasons of `begin`.
        """
        before, self._under_way = self._under_way, None
        if before is None:
            return
        values, message = before
        message.wait() if isinstance(message, dist.Work) else message.synchronize()
        self._judge(values)

    def _judge(self, values: Tensor) -> None:
        rows = [row[:-1] for row in values.tolist()]
        if all(row == rows[0] for row in rows):
            return
        self._shapes = []
        refuse_unlike(self._mesh, [row[0] for row in rows])
        self._random.refuse_unlike([row[1] for row in rows])
        self._settings.refuse_unlike([row[2] for row in rows])
        self._numbers.refuse_unlike([row[3] for row in rows])
        self._common.refuse_unlike([row[4:] for row in rows])


def _write(slots: Tensor, numbers: Sequence[Tensor | int]) -> None:
    """Fill slots with a number each, without waiting for a device."""
    for slot, number in zip(slots, numbers, strict=True):
        slot.fill_(number)
