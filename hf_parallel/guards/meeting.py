"""A call that all ranks must make together, made by some of them only, ends with an error instead of a hang.

`if accelerator.is_main_process: model.save_pretrained(folder)` is right under DDP and waits for ever where every rank holds a
part of the model.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from hf_parallel.compat.private_collectives import private_store
from hf_parallel.errors import RankMismatchError, UnsupportedError
from hf_parallel.mesh.groups import Mesh


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MEETING_S = 120.0
_MADE: Counter[str] = Counter()  # meetings about something in this process; those who meet make them together


class Meeting:
    """Counts the ranks that have come to a call, in the job's key-value store.

    Args:
        names: Names of the ranks.
        bound_s: Longest wait for the others.
        ranks: These ranks, ascending; None for all.
        topic: Tells this from other meetings in the same job, those of models that were trained before (`topic_of_its_own`).
        advice: Advice about a call that not all ranks make.
    """

    def __init__(
        self,
        names: Sequence[str],
        bound_s: float = MEETING_S,
        *,
        ranks: Sequence[int] | None = None,
        topic: str = "all",
        advice: str = "Take it out of `if accelerator.is_main_process:`; rank 0 writes.",
    ) -> None:
        self._names, self._bound_s = list(names), bound_s
        self._ranks, self._topic, self._advice = range(len(names)) if ranks is None else ranks, topic, advice
        self._store: Store | None = None
        self._calls = 0

    def meet(
        self,
        what: str,
        advice: str | None = None,
        reason: str = "each rank holds a part of the model",
        *,
        alike: bool = True,
    ) -> None:
        """Wait until every rank has called this as often; nothing without other ranks.

        Args:
            what: The call, in words.
            advice: Advice if not all make it; None for that of all calls.
            reason: Why all must.
            alike: Whether all must call it in the same words: other calls wait for other messages.

        Raises:
            UnsupportedError: Some did not come in time, or came to another call.
        """
        told = self._told(what, alike=alike)
        if told is not None:
            apart = next((rank for rank, said in told.items() if alike and said != what), None)
            if apart is not None:
                raise UnsupportedError(
                    f"{what} was called where {self._names[apart]} called {told[apart]}: {reason}, so all must make the same calls. "
                    f"{advice or self._advice}"
                )
            here, missing = self._here_and_missing(told)
            raise UnsupportedError(
                f"{what} was called by {here} and for {self._bound_s:g} s not by {missing}: {reason}, so "
                f"all must call it. {advice or self._advice}"
            )

    def agree(self, flags: str, step: int) -> None:
        """Wait until every rank has come with the same flags of a `TrainerControl`.

        Args:
            flags: Names of the flags that are set.
            step: Optimizer step after which they are set.

        Raises:
            RankMismatchError: Some ranks came with other flags, or not in time.
        """
        what = f"{flags} after step {step}"
        apart = self.differences(what)
        if apart:
            raise RankMismatchError(
                f"TrainerControl has {what} on {apart}: all ranks must log, evaluate, save and stop at the same step. A "
                "callback sets it on some ranks only (`if state.is_world_process_zero:`, a clock, a number of one replica). Set it on every "
                "rank; accelerator.set_trigger() on one and check_trigger() on all of them tell them."
            )

    def differences(self, what: str) -> str:
        """Wait until every rank has come with the same words.

        Args:
            what: They.

        Returns:
            "" if all came with them; else who did, and what others came with, or who did not come in time.
        """
        told = self._told(what, alike=True)
        if told is None:
            return ""
        here, missing = self._here_and_missing(told)
        others = {text: rank for rank, text in told.items() if text != what}
        beside = f"for {self._bound_s:g} s not on {missing}" if missing else "not on the others"
        if others:
            text, rank = next(iter(others.items()))
            here = ", ".join(self._names[one] for one, said in told.items() if said == what)
            beside = f"{text} on {self._names[rank]}"
        return f"{here} and {beside}"

    def _told(self, what: str, *, alike: bool) -> dict[int, str] | None:
        """The words of the ranks that have come so far; None if all have come (and, with `alike`, have said the same)."""
        if len(self._names) == 1 or not dist.is_initialized():
            return None
        self._store = self._store or private_store()
        if self._store is None:
            return None
        store, self._calls = self._store, self._calls + 1
        key = f"hf_parallel/meeting/{self._topic}/{self._calls}"
        store.set(f"{key}/{self._ranks.index(dist.get_rank())}", what)
        same = f"{key}/{zlib.crc32(what.encode())}" if alike else key
        if alike:
            store.add(same, 1)
        store.add(key, 1)
        if _until(lambda: store.add(key, 0) >= len(self._names), self._bound_s) and store.add(same, 0) >= len(
            self._names
        ):
            return None
        here = [rank for rank in range(len(self._names)) if store.check([f"{key}/{rank}"])]
        return {rank: store.get(f"{key}/{rank}").decode() for rank in here}

    def _here_and_missing(self, told: Collection[int]) -> tuple[str, str]:
        here = [name for rank, name in enumerate(self._names) if rank in told]
        missing = [name for rank, name in enumerate(self._names) if rank not in told]
        return ", ".join(here), ", ".join(missing)


def topic_of_its_own(about: str, group: dist.ProcessGroup | None) -> str:
    """Return another topic each time, the same one on all ranks of a group that ask equally often.

    Args:
        about: Tells what they meet for.
        group: The ranks, of this run: its name is that of no other one in the job. So what only some ranks have
            asked for in an earlier run, because others had failed, does not count. None: one rank, or all of them.
    """
    topic = about if group is None else f"{about} {group.group_name}"
    _MADE[topic] += 1
    return f"{topic} {_MADE[topic]}"


def meeting_of_copy(mesh: Mesh) -> Meeting:
    """Make the meeting of all ranks of this rank's model copy, for reads that need all of them."""
    return Meeting(
        [mesh.shape.describe(rank) for rank in mesh.copy_ranks],
        ranks=mesh.copy_ranks,
        topic=topic_of_its_own("copy", mesh.mp_group),
        advice="Read it on every rank, and log on one.",
    )


def meeting_of_replicas(mesh: Mesh, bound_s: float = MEETING_S) -> Meeting:
    """Make the meeting of the ranks that hold the same part of the model."""
    shape = mesh.shape
    ranks = [shape.rank_at(replica, mesh.pp_rank, mesh.tp_rank, mesh.sp_rank) for replica in range(shape.dp_size)]
    return Meeting(
        [shape.describe(rank) for rank in ranks],
        bound_s,
        ranks=ranks,
        topic=topic_of_its_own("replicas", mesh.dp_group),
    )


def meeting_of_shards(mesh: Mesh) -> Meeting:
    """Make the meeting of the ranks that hold the shards of this rank's stage, for reads that need all of them."""
    ranks = mesh.parts_ranks
    return Meeting(
        [mesh.shape.describe(rank) for rank in ranks],
        ranks=ranks,
        topic=topic_of_its_own("shards", mesh.parts.group),
        advice="Read them on every rank, and log on one.",
    )


def _until(condition: Callable[[], bool], bound_s: float) -> bool:
    """Ask again and again, less and less often; whether it came true in time."""
    end, pause = time.monotonic() + bound_s, 0.002
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return True
