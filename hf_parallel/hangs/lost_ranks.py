"""Names the rank that failed or died.

What the others then get from their collectives becomes a `RankFailure` that names it: an uncaught exception is noted in the
store before its process ends.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_parallel.compat.private_collectives import is_connection_loss
from hf_parallel.errors import RankFailure
from hf_parallel.hangs.blame import UNLIKE
from hf_parallel.hangs.heartbeats import ENDING_S, IDLE, Heartbeats


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType


class LostRanks:
    """Names the ranks that have failed or are gone.

    Args:
        rank: This rank.
        names: Words for every rank, in rank order.
        beats: Gives the heartbeats of all ranks.
        doing: Gives what this rank does now, in words that follow a name.
    """

    def __init__(
        self, rank: int, names: Sequence[str], beats: Callable[[], Heartbeats], doing: Callable[[], str]
    ) -> None:
        self._rank, self._names, self._beats, self._doing = rank, names, beats, doing

    @contextmanager
    def named(self, *, in_collective: bool = True) -> Iterator[None]:
        """Turn the error of a lost connection into one that says which rank is gone.

        Args:
            in_collective: Whether only collectives run inside, so that their errors are known to be theirs.

        Raises:
            RankFailure: A connection to another rank was lost inside.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_connection_loss(error, in_collective=in_collective):
                raise
            raise RankFailure(self._loss(error)) from error

    def _loss(self, error: BaseException) -> str:
        """Name who is gone, as far as is known: a rank that raised has said so, one that died is one of the others."""
        failed = self._beats().board.read("failed")
        others = [rank for rank in range(len(self._names)) if rank != self._rank]
        said = {rank: text.removesuffix(".") for rank, text in failed.items()}
        known = ", ".join(f"{self._names[rank]}, which failed with {text}" for rank, text in said.items())
        few = len(others) <= 8
        one_of = ", ".join(self._names[rank] for rank in others) if few else f"the {len(others)} others"
        lost = known or (one_of if len(others) == 1 else f"a rank, one of {one_of}")
        ends = {} if known else self._beats().ends(ENDING_S)
        if ends:
            lost = ", ".join(f"{self._names[rank]}, which has {how}" for rank, how in ends.items())
        if any("SIGABRT" in how for how in ends.values()):
            lost += f" (gloo aborts when a tensor of another size arrives: has one rank a batch of another shape? {UNLIKE})"
        text = self._doing()
        where = f" It {text}." if text != IDLE else ""
        return (
            f"{self._names[self._rank]} lost {lost}.{where} Look for the first error of that rank; if it left none, it "
            f"was killed (out of memory?) or ended by itself. ({error})"
        )

    def name_uncaught_exceptions(self) -> None:
        """Name this rank, here and to the others, after the traceback of an uncaught exception."""
        previous = sys.excepthook
        if getattr(previous, "hf_parallel", False):
            previous = previous.previous  # type: ignore[attr-defined]  # of an earlier run in this process
        name = self._names[self._rank]

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if is_connection_loss(error):
                error = RankFailure(self._loss(error))
            elif not isinstance(error, RankFailure):
                self._beats().board.write("failed", f"{kind.__name__}: {error}")
                self._beats().board.flush()
            previous(kind, error, trace)
            tell(f"hf_parallel: {name} failed: {type(error).__name__}: {error}")

        hook.hf_parallel, hook.previous = True, previous  # type: ignore[attr-defined]
        sys.excepthook = hook


def tell(text: str) -> None:
    """To stderr at once: the process may end before a logger's handlers have run."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
