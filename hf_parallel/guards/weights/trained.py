"""Refuse ranks that train different parameters of those they share (`requires_grad`), whenever user code changes it.

A shard that is frozen on one rank only, or a part of what ZeRO updates, trains another model. Digests of it ride on messages that
are sent anyway. Replicas without ZeRO send nothing before their gradients, in buckets that would not fit each other: who
wants other buckets waits for the others to want the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import nn

from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.meeting import MEETING_S, Meeting, topic_of_its_own
from hf_parallel.mesh.groups import Mesh


PATIENCE_S = MEETING_S
BITS = 48  # exact as a float64
RULE = (
    "all ranks that hold a parameter must train it in the same steps. Code freezes or unfreezes it (requires_grad) on some ranks "
    "only (`if state.is_world_process_zero:`, `if accelerator.is_main_process:`). Do it on every rank, after the same step."
)


class TrainedWord:
    """A digest of which of some parameters are trained.

    Args:
        parameters: The same ones, in the same order, on all ranks that compare it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._flags: list[bool] = []
        self._word = 1

    def now(self) -> int:
        """Never zero."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags:
            digest = hashlib.blake2b(bytes(flags), digest_size=8).digest()
            self._flags, self._word = flags, int.from_bytes(digest, "big") & ((1 << BITS) - 1) | 1
        return self._word


def refuse_unlike_trained(names: Sequence[str]) -> None:
    """Refuse what a message has shown to differ.

    Args:
        names: Ranks that should train the same parameters and do not, in words; none if all do.

    Raises:
        RankMismatchError: There are some.
    """
    if names:
        raise RankMismatchError(f"{' and '.join(names)} train different parameters: {RULE}")


class SameChange:
    """Lets a rank wait until all replicas want to train other parameters.

    Args:
        mesh: This rank's mesh.
        waiting: Context for waits on other ranks.
    """

    def __init__(self, mesh: Mesh, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        self._waiting = waiting
        self._meeting: Meeting | None = None
        if mesh.copies_group is not None:
            ranks = dist.get_process_group_ranks(mesh.copies_group)
            names = [mesh.shape.describe(rank) for rank in ranks]
            topic = topic_of_its_own("trained", mesh.copies_group)
            self._meeting = Meeting(names, PATIENCE_S, ranks=ranks, topic=topic)

    def meet(self, changed: Sequence[tuple[str, bool]]) -> None:
        """Wait for the others.

        Args:
            changed: Names of parameters, and whether they are trained from now on.

        Raises:
            RankMismatchError: Some did not come in time, or want something else.
        """
        if self._meeting is None:
            return
        name, is_trained = changed[0]
        digest = hashlib.blake2b(repr(changed).encode(), digest_size=4).hexdigest()
        what = f"{name} ({len(changed)} parameters, {digest}) set to {is_trained}"
        with self._waiting(f"waits for the other replicas, because it has requires_grad of {what}"):
            apart = self._meeting.differences(what)
        if apart:
            raise RankMismatchError(f"requires_grad of {what} on {apart}: {RULE}")
