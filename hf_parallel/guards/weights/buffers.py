"""Buffers that move in training: running statistics, power iterations of a spectral norm, averages kept by a loss.

DDP sends those of rank 0 to all replicas before the first forward pass of each step; so do we, if there are any, whether a
forward pass writes to them or user code between two of them. A pipeline runs a batch as several forward passes, which is
another sequence of writes: refused, for plain numbers on modules too (a count of calls that a weight is annealed by). Ranks that
share the tokens of a row write what their parts give: refused where these differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.batches import digest
from hf_parallel.compat.private_torch import is_persistent, own_buffers, version_of
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.meeting import MEETING_S, meeting_of_replicas
from hf_parallel.guards.untouched import Untouched
from hf_parallel.mesh.groups import Mesh


PATIENCE_S = MEETING_S
LOOKS = 2  # steps whose first training forward pass is watched: replicas may have other numbers of passes in a step
State: TypeAlias = tuple[Tensor, int, Tensor | None]  # a buffer, how often it was written to, its values
MOST = 2**20  # elements of a buffer whose values are compared; larger ones are taken at their version


class MovingBuffers:
    """Finds the buffers that move, and keeps them equal over the replicas.

    Args:
        model: This rank's part of the model.
        mesh: This rank's mesh.
        device: Device of the model.

    Attributes:
        moving: Names of the buffers that forward passes of any rank write to.
        sends: Whether replicas get the values of the first one; False leaves each its own.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self._looks = LOOKS if mesh.shape.world_size > 1 else 0
        self._moving: list[str] = []
        self.moving: list[str] = []
        self.sends = True
        self._is_due = True
        # Without walking over the modules: a buffer that user code registers is one of the whole model, or beside others.
        tables = [own_buffers(module) for module in model.modules()]
        self._tables = [tables[0], *filter(None, tables[1:])] if mesh.copies_group is not None else []
        self._begun: dict[str, State] = {}  # at the beginning of the step, while steps are watched
        self._left = Untouched(self._tables)  # since the end of the pass before
        self._has_left = False
        self._late: dict[int, Tensor] = {}  # written to between later passes, by id
        self._meeting = meeting_of_replicas(mesh, PATIENCE_S)

    def end_step(self) -> None:
        """Let the next forward pass begin with the buffers of the first replica."""
        self._is_due = True

    @contextmanager
    def watching(self, num_passes: int = 1, batches: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
        """Around a training forward pass; collective at the first one of the first steps, and where buffers move.

        What user code writes to later for the first time is agreed on then: all replicas must do so in the same step.

        Args:
            num_passes: Forward passes that one process would run as one.
            batches: Batches of the pass: a number that becomes the length of a row counts nothing.

        Raises:
            UnsupportedError: Buffers move and there are several; on every rank. Or some replicas alone wrote to buffers.
        """
        self._look_between()
        looks = self._is_due and self._looks > 0
        if self._is_due:
            if self._moving and self.sends:
                self._send()
            self._begun = self._states() if looks else {}
        self._is_due, before = False, self._begun
        numbers = self._numbers() if looks and num_passes > 1 else {}
        yield
        if looks:
            self._looks -= 1
            moved = [name for name, state in self._states().items() if self._has_moved(name, before.get(name), state)]
            now = self._numbers() if numbers else {}
            lengths = {
                size for batch in batches for v in batch.values() if isinstance(v, Tensor) for size in v.shape[1:]
            }
            moved += [name for name in numbers if now.get(name) not in {numbers[name], *lengths}]
            self._agree(moved, num_passes)
        self._leave()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around a forward pass that trains nothing: what it writes is not written by user code."""
        yield
        self._leave()

    def _leave(self) -> None:
        """Take note of all buffers after a forward pass: what it wrote is not written by user code."""
        if self._tables and (self._begun or not self._has_left or self._left.is_written):
            self._left.take()
            self._has_left = True

    def _look_between(self) -> None:
        """Find what was written since the pass before; collective over the replicas if there may be something."""
        if self._mesh.copies_group is None or not self.sends or not self._has_left:
            return
        if self._begun:
            if self._is_due:
                states = self._states()
                self._share([name for name, state in states.items() if _differs(self._begun.get(name), state)])
            return
        found = self._left.written() if self._left.is_written else []
        if self._is_due or found or self._moving:  # which forward passes write to: then all are taken anew after each
            found += self._left.rewritten()
        if found:
            self._late |= {id(buffer): buffer for buffer in found}
            self._left.take()
        if self._late and self._is_due:
            self._share_late()

    def _share_late(self) -> None:
        names = [name for name, buffer in self._model.named_buffers() if id(buffer) in self._late]
        names = [name for name in names if name not in self._moving]
        self._late = {}
        if names:
            self._meeting.meet(
                f"the exchange of buffer {names[0]}, which user code changed between two forward passes,",
                "Change it on every replica in the same step: all get the values of the first one.",
                alike=False,  # each replica may have changed others first
            )
            self._share(names)

    def _share(self, moved: list[str]) -> None:
        """Agree over the replicas: a buffer that any of them has written to moves."""
        everyone: list[list[str]] = [[] for _ in range(self._mesh.shape.num_copies)]
        dist.all_gather_object(everyone, moved, group=self._mesh.copies_group)
        self._moving = sorted({*self._moving, *(name for names in everyone for name in names)})

    def _numbers(self) -> dict[str, float]:
        """Plain numbers that modules have, by name."""
        return {
            f"{prefix}.{key}": value
            for prefix, module in self._model.named_modules()
            for key, value in vars(module).items()
            if type(value) in (int, float) and value == value
        }

    def _states(self) -> dict[str, State]:
        return {
            name: (buffer, version_of(buffer), buffer.detach().clone() if buffer.numel() <= MOST else None)
            for name, buffer in self._model.named_buffers()
            if type(buffer) is Tensor and not buffer.is_meta
        }

    def _has_moved(self, name: str, before: State | None, now: State) -> bool:
        """Whether a buffer was written to, or replaced, and has other values now."""
        if before is None or (before[0] is now[0] and before[1] == now[1]):
            return False
        if before[0] is not now[0]:
            place, _, key = name.rpartition(".")
            owner = self._model.get_submodule(place)
            if type(owner).__module__.startswith("transformers.") and not is_persistent(owner, key):
                return False  # frequencies for rows of another length, of no row in particular
        return before[2] is None or now[2] is None or not torch.equal(before[2], now[2])

    def _agree(self, moved: list[str], num_passes: int) -> None:
        """Agree over all ranks: buffers of any of them count, and each replica has the same list."""
        flags = torch.tensor([int(bool(moved)), int(bool(moved) and num_passes > 1)], device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        anywhere, split = flags.tolist()
        if not anywhere:
            return
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, moved)
        self.moving = sorted({*self.moving, *(name for names in everyone for name in names)})
        if split:
            raise UnsupportedError(
                f"the forward pass writes to {len(self.moving)} buffers or numbers in training (first: {self.moving[0]}) with "
                f"pp_size={self._mesh.shape.pp_size}: a batch runs as {num_passes} microbatches, so they would be written to as "
                "often (running statistics, power iterations, counts). Set pipeline.num_microbatches to 1, or pp_size to 1."
            )
        shape = self._mesh.shape
        if shape.sp_size > 1:
            self._refuse_parts(everyone)
        mine = [
            set(everyone[shape.rank_at(replica, self._mesh.pp_rank, self._mesh.tp_rank, part)])
            for replica in range(shape.dp_size)
            for part in range(shape.sp_size)
        ]
        self._moving = sorted(set.union(set(self._moving), *mine))

    def _refuse_parts(self, everyone: Sequence[Sequence[str]]) -> None:
        """Refuse buffers that ranks of one row have other values of: each wrote what its part of the row gives.

        Args:
            everyone: Buffers that each rank wrote to.
        """
        buffers = dict(self._model.named_buffers())
        written = [name for name in sorted({*itertools.chain(*everyone)}) if name in buffers]
        values: list[list[int]] = [[] for _ in everyone]
        dist.all_gather_object(values, [digest([{name: buffers[name]}]) for name in written])
        shape = self._mesh.shape
        for replica, stage, tp_rank in itertools.product(*map(range, (shape.dp_size, shape.pp_size, shape.tp_size))):
            of_row = [values[shape.rank_at(replica, stage, tp_rank, part)] for part in range(shape.sp_size)]
            unequal = [name for name, *found in zip(written, *of_row, strict=True) if len({*found}) > 1]
            if unequal:
                raise UnsupportedError(
                    f"the forward pass writes to {len(unequal)} buffers in training (first: {unequal[0]}) with "
                    f"sp_size={shape.sp_size}: each rank writes what its part of a row gives, so that counts of tokens and running "
                    "statistics would be those of a part. Set sp_size to 1; tp_size and zero.stage also save memory."
                )

    @torch.no_grad()
    def _send(self) -> None:
        group = self._mesh.copies_group
        if group is None:
            return
        for name in self._moving:
            dist.broadcast(self._model.get_buffer(name), group=group, group_src=0)
        self._left.take()


def _differs(before: State | None, now: State) -> bool:
    """Whether another tensor or other values are in its place, however they came there."""
    if before is None or before[2] is None or now[2] is None:
        return before is None or before[0] is not now[0] or before[1] != now[1]
    return not torch.equal(before[2], now[2])
