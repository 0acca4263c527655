"""Start the reduction of a bucket while the last backward pass of a step still computes the gradients of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from hf_parallel.compat.private_torch import accumulation_hooks
from hf_parallel.data_parallel.buckets import Bucket
from hf_parallel.errors import UnsupportedError


class Overlap:
    """Calls `start(index)` for every bucket, in order, as soon as its gradients and those of all before are complete.

    The first armed pass only records: a parameter whose gradient arrives in several pieces (reentrant checkpointing
    runs a backward pass inside another) is not complete when it first arrives, so its bucket is started at the end.

    Args:
        buckets: The buckets, in the order in which all ranks start them.
        start: Starts one.
        arrived: Called as ``arrived(index, position)`` when a gradient is complete whose bucket may start before the end.
        skipped: Indices of buckets that are always started at the end.
        watches: Whether anything is started before `finish`.
        noticed: Called before anything else when a gradient has arrived, in whichever backward pass; None: nobody asks.
        early: Called when a gradient has arrived in a pass that is not armed.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        start: Callable[[int], None],
        arrived: Callable[[int, int], None],
        skipped: frozenset[int] = frozenset(),
        *,
        watches: bool = True,
        noticed: Callable[[], None] | None = None,
        early: Callable[[], None] = lambda: None,
    ) -> None:
        self._buckets = buckets
        self._start, self._take = start, arrived
        self._skipped = skipped if watches else frozenset(range(len(buckets)))
        self._noticed, self._early = noticed, early
        self._armed = False
        self._next = 0
        self._seen: dict[int, int] = {}  # pieces of the gradient of each parameter in the armed pass
        self._whole: set[int] | None = None  # buckets whose gradients come in one piece; None: not known yet
        self._missing: list[int] = []
        self._watched: set[int] = set()  # buckets with parameters that have hooks of user code
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(index, position))
            for index, bucket in enumerate(buckets)
            if noticed is not None or index not in self._skipped
            for position, param in enumerate(bucket.params)
        ]

    def remove(self) -> None:
        """Remove the hooks on the parameters."""
        for handle in self._handles:
            handle.remove()

    def arm(self) -> None:
        """Take the gradients that arrive from now on for the last of this step."""
        if not self._armed:
            self._armed = True
            self._seen.clear()
            self._missing = [len(bucket.params) for bucket in self._buckets]
            # Hooks of user code on accumulated gradients run after ours, and what they change must be reduced too.
            self._watched = {
                index
                for index, bucket in enumerate(self._buckets)
                if index not in self._skipped and any(len(accumulation_hooks(param)) > 1 for param in bucket.params)
            }

    def finish(self) -> None:
        """Start the remaining buckets after the backward pass.

        Raises:
            UnsupportedError: A gradient is sparse and no bucket was started.
        """
        if self._next == 0:
            for bucket in self._buckets:
                bucket.refuse_sparse()
        while self._next < len(self._buckets):
            self._start_next()
        if self._armed and self._whole is None:
            repeated = {key for key, count in self._seen.items() if count > 1}
            self._whole = {
                index
                for index, bucket in enumerate(self._buckets)
                if index not in self._skipped and not repeated & {id(param) for param in bucket.params}
            }
        self._armed, self._next = False, 0

    def _start_next(self) -> None:
        self._next += 1
        self._start(self._next - 1)

    def _may_start(self, index: int) -> bool:
        whole = self._whole is not None and index in self._whole
        return whole and index not in self._watched and not self._missing[index]

    def _hook(self, index: int, position: int) -> Callable[[nn.Parameter], None]:
        # The garbage collector does not see what a hook on an accumulated gradient refers to: buckets and the model that
        # they are of would stay in memory when the run has ended.
        reference = weakref.ref(self)

        def arrived(param: nn.Parameter) -> None:
            watched = reference()
            if watched is None:
                return
            if watched._noticed is not None:
                watched._noticed()
            if not watched._armed:
                watched._early()
            elif index not in watched._skipped:
                watched._arrived(index, position, param)

        return arrived

    def _arrived(self, index: int, position: int, param: nn.Parameter) -> None:
        self._seen[id(param)] = pieces = self._seen.get(id(param), 0) + 1
        if self._whole is None or index not in self._whole or index in self._watched:
            return
        if pieces > 1:
            raise UnsupportedError(
                f"the gradient of {self._buckets[index].names[position]} arrived in several pieces in one backward "
                "pass, after passes in which it came whole: its reduction may have begun without the rest. Set "
                "data_parallel.overlap to false."
            )
        self._take(index, position)
        self._missing[index] -= 1
        if self._missing[index]:
            return
        while self._next < len(self._buckets) and self._may_start(self._next):
            self._start_next()
