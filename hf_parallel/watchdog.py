"""Turns a hang into a named failure within a stated bound.

Each rank keeps one line of status ("stage 1 waits for the activation of microbatch 3 from stage 0"). A thread publishes
it to the job's key-value store. When this rank has waited for another one longer than `timeout_s`, the thread reads
everybody's line, prints who is being waited for and what that rank was last seen doing, and ends the process; the
launcher then takes the rest of the job down. A thread, because the main one may be inside a collective that never
returns; `os._exit`, because such a call cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO


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
        names: Words for every rank, in rank order, such as `rank 1 (stage 1 of 2)`.
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
        """Mark a block that waits for other ranks."""
        self.waits(text)
        try:
            yield
        finally:
            self.runs()

    def start(self) -> None:
        """Start the thread and name this rank in the report of an uncaught exception."""
        if self._thread is not None:
            return
        name_uncaught_exceptions(self._names[self._rank])
        if self._store is None or len(self._names) < 2:
            return
        self._thread = threading.Thread(target=self._watch, name="hf_parallel-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the thread ends within its next tick."""
        self._stop.set()

    def _watch(self) -> None:
        tick = max(0.05, min(1.0, self._timeout_s / 4))
        while not self._stop.wait(tick):
            waits, text, since = self._line
            age = time.monotonic() - since
            self._publish(waits, text, age)
            if waits and age > self._timeout_s:
                time.sleep(tick)  # let ranks that stopped at the same moment publish their last line
                self._end(text, age)

    def _publish(self, waits: bool, text: str, age: float) -> None:
        beat = json.dumps({"waits": waits, "text": text, "age": round(age, 1), "at": time.time()})
        try:
            self._store.set(f"hf_parallel/beat/{self._rank}", beat)  # type: ignore[union-attr]
        except (RuntimeError, OSError):
            self._stop.set()  # the store's host is gone: the launcher sees that rank die

    def _beats(self) -> dict[int, dict[str, Any]]:
        beats = {}
        for rank in range(len(self._names)):
            key = f"hf_parallel/beat/{rank}"
            try:
                if self._store.check([key]):  # type: ignore[union-attr]
                    beats[rank] = json.loads(self._store.get(key))  # type: ignore[union-attr]
            except (RuntimeError, OSError):
                continue
        return beats

    def _end(self, text: str, age: float) -> None:
        stream = self._stream or sys.stderr
        print(report(self._names, self._rank, text, age, self._beats(), self._timeout_s), file=stream, flush=True)
        os._exit(EXIT_CODE)


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


def name_uncaught_exceptions(name: str) -> None:
    """After the traceback of an uncaught exception, print one line that names this rank."""
    previous = sys.excepthook
    if getattr(previous, "names_rank", None) == name:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        sys.stderr.write(f"hf_parallel: {name} failed: {kind.__name__}: {error}\n")
        sys.stderr.flush()

    hook.names_rank = name  # type: ignore[attr-defined]
    sys.excepthook = hook
