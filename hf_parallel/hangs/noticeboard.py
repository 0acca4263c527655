"""Short notes of the ranks to each other through the job's key-value store, which never make the caller wait for long.

A call on a store whose host cannot be reached returns after minutes, whatever its time-out says, and it keeps everybody
from that connection. So one thread alone touches the store; others leave notes with it and wait for answers as long as they
can afford to. That thread must not be inside such a call when the interpreter is taken down, which aborts the process:
`close` ends it, also at exit.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store


ANSWER_S = 2.0  # longest wait for the store
END = "hf_parallel/end"


class _Question:
    """Question to the store, and the answer once it is there."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self.found: dict[int, str] = {}
        self.answered = threading.Event()


class NoticeBoard:
    """The notes of one rank, and what it knows of those of the others.

    Args:
        store: Shared by all ranks; nobody else may use this connection. None without other ranks.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        ended: Rank that ended the job and its reason, once this board has read it.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._notes: dict[str, str] = {}
        self._questions: deque[_Question] = deque()
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._calling_since: float | None = None
        self._lost = ""
        self._pid = os.getpid()
        self.ended: str | None = None

    def write(self, kind: str, text: str) -> None:
        """Leave a note of this rank; of notes of one kind the last one counts. Returns at once."""
        self._leave(f"hf_parallel/{kind}/{self._rank}", text)

    def end(self, text: str) -> None:
        """Tell every rank that the job ends, and why; what the first says counts. Returns at once."""
        self._leave(END, text)

    def read(self, kind: str, timeout_s: float = ANSWER_S) -> dict[int, str]:
        """Read the last entry of each rank that has written one; nothing if the store does not answer in time."""
        return self._ask(_Question(kind), timeout_s).found

    def flush(self, timeout_s: float = ANSWER_S) -> bool:
        """Wait until the notes of this rank are with the store; whether they are."""
        return self._ask(_Question(None), timeout_s).answered.is_set()

    def trouble(self) -> str:
        """Describe the trouble with the store; empty if none is known."""
        host = os.environ.get("MASTER_ADDR")
        name = "the store of the job" + (f" on {host}" if host else "")
        since = self._calling_since
        if since is not None and time.monotonic() - since > ANSWER_S / 4:
            return f"{name} has not answered for {time.monotonic() - since:.1f} s, so the network to it is cut or its host is gone"
        return f"{name} cannot be reached ({self._lost})" if self._lost else ""

    def close(self, timeout_s: float = ANSWER_S) -> None:
        """Send what is left and end the thread; a later note starts it again."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid or thread is threading.current_thread():
            return
        with self._lock:
            self._closing = True
        self._wake.set()
        thread.join(timeout_s)
        if not thread.is_alive():
            with self._lock:
                self._thread = None
            atexit.unregister(self.close)

    def _leave(self, key: str, text: str) -> None:
        if self._store is None or os.getpid() != self._pid:  # a fork shares the connection and would garble it
            return
        with self._lock:
            self._notes[key] = text
            self._begin()
        self._wake.set()

    def _ask(self, question: _Question, timeout_s: float) -> _Question:
        if self._store is None or os.getpid() != self._pid:
            return question
        with self._lock:
            self._questions.append(question)
            self._begin()
        self._wake.set()
        question.answered.wait(timeout_s)
        return question

    def _begin(self) -> None:
        """Start the thread, if it does not run; the lock is held."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="hf_parallel-notes", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _serve(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                notes, self._notes = self._notes, {}
                questions = [self._questions.popleft() for _ in range(len(self._questions))]
                closing = self._closing
            self._post(notes)
            for question in questions:
                question.found = {} if question.kind is None else self._collect(question.kind)
                if self._store is not None:
                    question.answered.set()
            if closing:
                return

    def _post(self, notes: dict[str, str]) -> None:
        for key, text in notes.items():
            if self._store is None:
                return
            self._calling_since = time.monotonic()
            try:
                if key == END:
                    self._store.compare_set(key, "", text)
                else:
                    self._store.set(key, text)
            except (RuntimeError, OSError, ValueError) as error:
                self._lose(error)
        if notes:
            found = self._get(END)
            self.ended = self.ended or found
        self._calling_since = None

    def _collect(self, kind: str) -> dict[int, str]:
        keys = [f"hf_parallel/{kind}/{rank}" for rank in range(self._world_size)]
        found: Sequence[str | None] = self._get_all(keys) or [self._get(key) for key in keys]
        self._calling_since = None
        return {rank: text for rank, text in enumerate(found) if text is not None}

    def _get_all(self, keys: list[str]) -> list[str]:
        """Every note by two questions, however many ranks there are; nothing if one has none, or the store cannot."""
        if self._store is None:
            return []
        self._calling_since = time.monotonic()
        try:
            if self._store.check(keys):
                return [value.decode() for value in self._store.multi_get(keys)]
        except (RuntimeError, OSError, ValueError, AttributeError, NotImplementedError):
            return []  # not every store has it; a store that is gone is noticed by the questions that follow
        return []

    def _get(self, key: str) -> str | None:
        if self._store is None:
            return None
        self._calling_since = time.monotonic()
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except (RuntimeError, OSError, ValueError) as error:
            self._lose(error)
            return None

    def _lose(self, error: Exception) -> None:
        """Its host is gone, or has ended its part of the run: a report will know this rank only, but it will come."""
        self._store, self._lost = None, (str(error).splitlines() or [type(error).__name__])[0][:200]
