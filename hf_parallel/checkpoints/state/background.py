"""Asynchronous saves: one at a time; the training thread of every rank raises their error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_parallel.checkpoints.state.pieces import Piece


@dataclass(frozen=True)
class Channels:
    """Groups of all ranks beside those of training, on the CPU; None in one process.

    Args:
        saving: For the thread that writes.
        asking: For the training thread, to ask whether it has finished everywhere.
    """

    saving: dist.ProcessGroup | None = None
    asking: dist.ProcessGroup | None = None

    @classmethod
    def make(cls, world_size: int, timeout: timedelta) -> Channels:
        """Make them; collective."""
        if world_size == 1:
            return cls()
        saving, asking = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        return cls(saving, asking)


class Background:
    """Work of one save in a thread of its own.

    Args:
        work: Writes; may use `channels.saving`, and raises the same on every rank or on none.
        channels: Groups.
    """

    def __init__(self, work: Callable[[], None], channels: Channels) -> None:
        self._work, self._channels = work, channels
        self._error: BaseException | None = None
        # A process that dies must not wait for it: what is not published is removed by the next save or resume.
        self._thread = threading.Thread(target=self._run, name="hf_parallel save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            self._error = error

    def has_ended(self) -> bool:
        """Whether it has ended on every rank; every rank asks at the same step, and hears the same."""
        mine = torch.tensor([0 if self._thread.is_alive() else 1])
        if self._channels.asking is not None:
            dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=self._channels.asking)
        return bool(mine)

    def wait(self) -> None:
        """Wait for the end, and raise what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def on_host(pieces: list[Piece]) -> list[Piece]:
    """The same elements in memory of their own, where training does not change them."""
    return [replace(piece, data=piece.data.detach().to("cpu", copy=True).contiguous()) for piece in pieces]
