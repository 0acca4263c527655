"""Turns a hang into a named failure within a stated bound.

Each rank keeps one line of status ("stage 1 waits for the activation of microbatch 3 from stage 0"). A thread publishes
it to the job's key-value store. When this rank has waited for another one longer than `timeout_s`, the thread reads
everybody's line, prints who is being waited for and what that rank was last seen doing, and ends the process; the
launcher then takes the rest of the job down. A thread, because the main one may be inside a collective that never
returns; `os._exit`, because such a call cannot be interrupted. Waits that nobody announced (in stock code, in a
tensor-parallel layer) are found on the stacks of this process: a thread that stays in one collective is waiting.

A rank that dies instead takes its connections with it. What the others then get from their collectives becomes a
`RankFailure` that names the rank: an uncaught exception is noted in the store before its process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from hf_parallel.compat import blocked_collective, is_connection_loss
from hf_parallel.errors import RankFailure


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from torch.distributed.distributed_c10d import Store


EXIT_CODE = 86
IDLE = "runs outside hf_parallel (data loading, user code)"


class Watchdog:
    """Watches this rank's waits.

    Args:
        store: Store shared by all ranks; a private clone, since a blocked call on the main thread's would block it too.
        rank: This rank.
        names: Words for every rank, in rank order, such as `rank 1 (pp 1 of 2)`.
        timeout_s: Longest wait, in seconds, before the job is ended. The job dies at most `2 + timeout_s / 4` seconds
            later than that.
        stream: Where the report goes; stderr by default.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
        stream: TextIO | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = list(names)
        self._timeout_s = timeout_s
        self._stream = stream
        self._line: tuple[bool, str, float] = (False, IDLE, time.monotonic())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def waits(self, text: str) -> None:
        """From now on this rank waits for others, for the reason `text`."""
        self._line = (True, text, time.monotonic())

    def runs(self, text: str = IDLE) -> None:
        """From now on this rank works by itself on `text`."""
        self._line = (False, text, time.monotonic())

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Mark a block that waits for other ranks; see `naming_losses`."""
        before = self._line
        self.waits(text)
        try:
            with self.naming_losses():
                yield
        finally:
            self._line = (before[0], before[1], time.monotonic())

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """Mark a call into the engine: whatever it announced last, afterwards this rank works for itself again."""
        try:
            with self.naming_losses():
                yield
        finally:
            self.runs()

    @contextmanager
    def naming_losses(self) -> Iterator[None]:
        """Turn the error of a lost connection into one that says which rank is gone.

        Raises:
            RankFailure: A connection to another rank was lost inside.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_connection_loss(error):
                raise
            raise RankFailure(self._loss(error)) from error

    def _loss(self, error: BaseException) -> str:
        """Who is gone, as far as is known: a rank that raised has said so, one that died is one of the others."""
        failed = self._read("failed")
        others = [rank for rank in range(len(self._names)) if rank != self._rank]
        known = ", ".join(f"{self._names[rank]}, which failed with {text}" for rank, text in failed.items())
        few = len(others) <= 8
        one_of = ", ".join(self._names[rank] for rank in others) if few else f"the {len(others)} others"
        lost = known or (one_of if len(others) == 1 else f"a rank, one of {one_of}")
        waits, text, _ = self._line
        where = f" It {'' if waits else 'was last seen: '}{text}." if text != IDLE else ""
        return (
            f"{self._names[self._rank]} lost {lost}.{where} Look for the first error of that rank; if it left none, it "
            f"was killed (out of memory?) or ended by itself. ({error})"
        )

    def start(self) -> None:
        """Start the thread and name this rank in the report of an uncaught exception."""
        if self._thread is not None:
            return
        self._name_uncaught_exceptions()
        if self._store is None or len(self._names) < 2:
            return
        self._thread = threading.Thread(target=self._watch, name="hf_parallel-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the thread ends within its next tick."""
        self._stop.set()

    def _watch(self) -> None:
        tick = max(0.05, min(1.0, self._timeout_s / 4))
        stay = Stay()
        while not self._stop.wait(tick):
            waits, text, since = self._line
            if not waits:
                collective, entered = stay.look()
                if collective is not None:
                    waits, text, since = True, f"{text}: waits for other ranks in {collective}", max(since, entered)
            age = time.monotonic() - since
            self._publish(waits, text, age)
            if waits and age > self._timeout_s:
                self._end(text, age, tick)

    def _publish(self, waits: bool, text: str, age: float, *, last: bool = False) -> None:
        beat = {"waits": waits, "text": text, "age": round(age, 1), "at": time.time(), "last": last}
        self._write("beat", json.dumps(beat))

    def _write(self, kind: str, text: str) -> None:
        store = self._store
        try:
            if store is not None:
                store.set(f"hf_parallel/{kind}/{self._rank}", text)
        except (RuntimeError, OSError):
            self._store = None  # its host is gone: the report will know this rank only, but it will come

    def _read(self, kind: str) -> dict[int, str]:
        """What each rank has last written, for those that have."""
        found: dict[int, str] = {}
        store = self._store
        for rank in range(len(self._names)):
            key = f"hf_parallel/{kind}/{rank}"
            try:
                if store is not None and store.check([key]):
                    found[rank] = store.get(key).decode()
            except (RuntimeError, OSError):
                break
        return found

    def _beats(self, tick: float) -> dict[int, dict[str, Any]]:
        """Each rank's last line; one that writes none any more (stopped, or stuck in foreign code) is not waiting."""
        before = self._read("beat")
        time.sleep(1.5 * tick)  # also lets ranks that stopped at the same moment write their last line
        beats = {rank: json.loads(text) for rank, text in self._read("beat").items()}
        for rank, beat in beats.items():
            if beat["waits"] and not beat["last"] and before.get(rank) == json.dumps(beat):
                beat.update(waits=False, text=f"silent; last seen: {beat['text']}")
        return beats

    def _end(self, text: str, age: float, tick: float) -> None:
        self._publish(True, text, age, last=True)
        stream = self._stream or sys.stderr
        message = report(self._names, self._rank, text, age, self._beats(tick), self._timeout_s)
        print(message, file=stream, flush=True)
        os._exit(EXIT_CODE)

    def _name_uncaught_exceptions(self) -> None:
        """After the traceback of an uncaught exception, name this rank here and to the others."""
        previous = sys.excepthook
        if getattr(previous, "hf_parallel", False):
            previous = previous.previous  # type: ignore[attr-defined]  # of an earlier run in this process
        name = self._names[self._rank]

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if is_connection_loss(error):
                error = RankFailure(self._loss(error))
            elif not isinstance(error, RankFailure):
                self._write("failed", f"{kind.__name__}: {error}")
            previous(kind, error, trace)
            stream = self._stream or sys.stderr
            print(f"hf_parallel: {name} failed: {type(error).__name__}: {error}", file=stream, flush=True)

        hook.hf_parallel, hook.previous = True, previous  # type: ignore[attr-defined]
        sys.excepthook = hook


class Stay:
    """How long this process has stayed in one collective."""

    def __init__(self) -> None:
        self._call: object = None
        self._since = 0.0

    def look(self) -> tuple[str | None, float]:
        """Name of the collective that a thread is in, or None, and since when it was seen in that very call."""
        call, name = blocked_collective()
        if call != self._call:
            self._call, self._since = call, time.monotonic()
        return name, self._since


def report(
    names: Sequence[str], rank: int, text: str, age: float, beats: dict[int, dict[str, Any]], timeout_s: float
) -> str:
    """The message of a hang: who waits, for what, and what every rank was last seen doing."""
    stuck = [r for r in range(len(names)) if r != rank and (r not in beats or not beats[r]["waits"])]
    lines = [f"hf_parallel: {names[rank]} gave up: {text}, for {age:.1f} s (monitor.hang_timeout_s={timeout_s:g})."]
    if stuck:
        lines.append("The job waits for: " + ", ".join(names[r] for r in stuck) + ".")
    for other in range(len(names)):
        beat = beats.get(other)
        seen = f"{beat['text']}, since {beat['age']:.1f} s" if beat else "never seen"
        lines.append(f"  {names[other]}: {seen}")
    lines.append("If that rank is only slow (a long evaluation, a first compilation), raise monitor.hang_timeout_s.")
    return "\n".join(lines)
