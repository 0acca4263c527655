"""Turns a hang into a named failure within a stated bound.

Each rank keeps one line of status ("waits at stage 1 for the activation of microbatch 3 from stage 0"), one assignment for each
action. A thread publishes it to the job's key-value store, with the stack of a rank that stays in one line. When this rank
has waited for another one longer than its steps explain (`blame`), the thread reads everybody's line, follows who waits for
whom, prints who holds up the job and where it is, and ends the process; the launcher then takes the rest of the job down.
Where what the others do was never measured (saving, evaluating, user code), it prints who is waited for, and ends the job
only after `timeout_s`. A thread, because the main one may be inside a collective that never
returns; `os._exit`, because such a call cannot be interrupted. Waits that nobody announced (in stock code, in a
tensor-parallel layer) are found on the stacks of this process: a thread that stays in one collective is waiting.

The clock is this rank's own, and the store is asked through a `NoticeBoard`, which answers in time or not at all: a machine
that is cut off from the store ends by itself. Who gives up tells the others, so that ranks whose watchdog still runs end
too, whoever launched them; a process of the same machine that writes no heartbeat (stopped, or stuck in code that lets no
thread run) is killed, because it would keep a launcher waiting until that kills it.

A rank that dies instead takes its connections with it: see `lost_ranks`.

One thread of a process watches at a time: a run that begins, or is used again, takes over from the one before.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_parallel.compat.private_collectives import record_prefix, write_record
from hf_parallel.hangs.blame import STEPS, agreed_bound, blame, chain, is_measured, moves, report
from hf_parallel.hangs.heartbeats import (
    IDLE,
    STORE_S,
    Excuse,
    Heartbeats,
    Line,
    Seen,
    Stay,
    StepTimes,
    kill_silent,
    noted,
    see,
)
from hf_parallel.hangs.lost_ranks import LostRanks, tell
from hf_parallel.hangs.noticeboard import NoticeBoard
from hf_parallel.machine.processes import birth_of, host_identity


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.distributed_c10d import Store


EXIT_CODE = 86
LEFT = "has left the run"
# A heartbeat every tick. From the end of a wait to the end of this process pass at most 2 s: a tick until it is noticed, the
# time for silent ranks to write again, and the time in which an unreachable store may fail to answer.
TICK_S = 0.4
RECORD_S = 1.0  # Seconds for the record of a rank's last collectives to be written.
# Seconds that the process of a rank which raised has to end by itself, before its watchdog ends the job.
LEFT_S = 5.0


class Watchdog:
    """Watches this rank's waits.

    Args:
        store: Store shared by all ranks; a private clone, since a blocked call on the main thread's would block it too.
        rank: This rank.
        names: Words for every rank, in rank order, such as `rank 1 (pp 1 of 2)`.
        timeout_s: Longest wait, in seconds, before the job is ended. The job dies at most 2 s later than that.
        floor_s: The same where it is known how long steps take, if they take a tenth of it at most.
        axes_of: Gives, in words, the axes of the mesh over which a group of ranks communicates.
        source: Origin of this rank's settings; empty if there is nothing to say.

    Attributes:
        lost: Names ranks that have failed or are gone.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
        floor_s: float = math.inf,
        axes_of: Callable[[Sequence[int]], str] = lambda ranks: "",
        source: str = "",
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = list(names)
        self._timeout_s = timeout_s
        self._floor_s = floor_s
        self._axes_of = axes_of
        self._source = source
        self._line = Line(False, IDLE, time.monotonic())
        self._phase = ""
        self._begins_epoch = False
        self._steps = StepTimes(floor_s, timeout_s)
        self._stop = threading.Event()
        self._thread: _WatchThread | None = None
        self._made_beats: Heartbeats | None = None
        self._resting = self._stopped = False
        self._left: tuple[str, float] | None = None
        self._done = Counter[str]()
        self.lost = LostRanks(rank, self._names, lambda: self._beats, lambda: self._line.text)

    @property
    def _beats(self) -> Heartbeats:
        if self._made_beats is None:
            self._made_beats = Heartbeats(NoticeBoard(self._store, self._rank, len(self._names)), self._rank)
        return self._made_beats

    @property
    def _board(self) -> NoticeBoard:
        return self._beats.board

    def waits(self, text: str, awaits: Sequence[int] | None = None) -> None:
        """Note that this rank waits now, for the reason `text`, for the ranks `awaits` if they are known."""
        self._line = Line(True, text, time.monotonic(), awaits)
        if self._resting:
            self.start()

    def runs(self, text: str = IDLE) -> None:
        """Note that this rank now works by itself on `text`."""
        self._line = Line(False, text, time.monotonic())
        if self._resting:
            self.start()

    def leaves_others(self, text: str) -> None:
        """Tell the others that this rank raises `text` while they wait for it in a layer, where only its end tells them.

        If it goes on all the same, because user code has caught the error, the job ends after `LEFT_S`.
        """
        self._left = text, time.monotonic()

    def begins_epoch(self) -> None:
        """Note that a data loader begins anew: until the engine is called no step says how long its first batch may take."""
        self._begins_epoch = True
        self._steps.leave_out()

    def ends_step(self) -> None:
        """Another optimizer step is done: the next one begins."""
        self._steps.end()
        self._done["optimizer steps"] += 1

    @contextmanager
    def doing(self, text: str, *, in_steps: bool = False) -> Iterator[None]:
        """Mark a block in which this rank does `text`.

        Args:
            text: In words that follow a name.
            in_steps: Whether every step does so, so that the times of steps say how long it may take.
        """
        before, phase = self._line, self._phase
        self._line = Line(False, text, time.monotonic())
        self._phase = phase if in_steps else phase or text
        try:
            yield
        finally:
            self._line, self._phase = Line(before.waits, before.text, time.monotonic(), before.awaits), phase
            if not in_steps:
                self._steps.leave_out()

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Mark a block that waits for other ranks, and in which only they can break a connection."""
        before = self._line
        self.waits(text)
        try:
            with self.lost.named():
                yield
        finally:
            self._line = Line(before.waits, before.text, time.monotonic(), before.awaits)

    @contextmanager
    def engaged(self, text: str = "") -> Iterator[None]:
        """Mark a call into the engine: whatever it announced last, afterwards this rank works for itself again.

        Code of the user runs inside: what that raises stays what it is.

        Args:
            text: Activity in every step, in words that follow a name; empty if it is no part of a step.
        """
        self._begins_epoch = False
        if text:
            self.runs(text)
            self._done[text.removeprefix("runs the ") + "es"] += 1
        try:
            with self.lost.named(in_collective=False):
                yield
        finally:
            self.runs()

    def start(self) -> None:
        """Start the thread and name this rank in the report of an uncaught exception; a run before this one rests."""
        if self._thread is not None or self._stopped:
            return
        self._resting = False
        self.lost.name_uncaught_exceptions()
        if self._store is None or len(self._names) < 2:
            return
        for thread in threading.enumerate():
            if isinstance(thread, _WatchThread):
                thread.watchdog.rest()
        self._stop.clear()
        self._board.write("who", json.dumps([*host_identity(), os.getpid(), birth_of(os.getpid())]))
        self._beats.publish(
            Seen(self._line, False, ""), 0.0, None
        )  # a process that stops before its first tick is missed from here on
        self._thread = _WatchThread(self)
        self._thread.start()
        atexit.register(self.stop)

    def rest(self) -> None:
        """Let another run of this process watch; this one watches again as soon as it is used again."""
        self._resting = True
        self._end_thread()

    def stop(self) -> None:
        """Stop watching for good, and wait until the threads have ended: none may be in the store when Python ends."""
        self._stopped, self._resting = True, False
        self._end_thread()

    def _end_thread(self) -> None:
        thread = self._thread
        if thread is None or thread.pid != os.getpid() or thread is threading.current_thread():
            return
        self._stop.set()
        thread.join(2 * TICK_S)
        self._thread = None
        atexit.unregister(self.stop)
        left = Line(False, LEFT, time.monotonic())
        self._line = left if self._stopped else self._line
        self._beats.publish(Seen(left, False, ""), 0.0, None, last=True)
        self._board.close()

    def _watch(self) -> None:
        tick = max(0.05, min(TICK_S, self._timeout_s / 4))
        stay, excuse, looked, judged = Stay(), Excuse(), time.monotonic(), 0.0
        told: object = None
        while not self._stop.wait(tick):
            now = time.monotonic()
            excuse.note(self._line, now - looked - tick)
            looked = now
            seen = see(self._line, self._phase or ("begins an epoch" if self._begins_epoch else ""), stay)
            seen = seen._replace(done=", ".join(f"{count} {what}" for what, count in sorted(self._done.items())))
            age = now - seen.line.since - excuse.seconds
            self._beats.publish(seen, age, self._steps.bound)
            if seen.line.waits and age > self._timeout_s:
                self._end(seen, age, self._beats.read(), self._timeout_s)
            elif seen.line.waits and age > (self._steps.bound or self._timeout_s) and now - judged > 2 * TICK_S:
                judged = now
                told = self._judge(seen, age, told)
            if self._left is not None and now - self._left[1] > LEFT_S:
                self._board.end(
                    json.dumps({"reason": f"{self._names[self._rank]} raised: {self._left[0]}", "silent": []})
                )
            if self._board.ended is not None:
                self._follow(self._board.ended)

    def _judge(self, seen: Seen, age: float, told: object) -> object:
        """End the job if measured steps say so, else say once who is waited for; returns the line of which it was said."""
        heartbeats = self._beats.read()
        heartbeats[self._rank] = noted(seen, age, self._steps.bound)
        bound = agreed_bound(heartbeats, self._timeout_s)
        path, stuck = blame(heartbeats, self._rank, len(self._names))
        if age <= bound or self._line.since > seen.line.since:
            return told
        if is_measured(heartbeats, self._rank, stuck):
            if moves(heartbeats, stuck):
                return told
            self._end(seen, age, heartbeats, bound)
        first = min((rank for rank, line in heartbeats.items() if line["waits"]), default=self._rank)
        if stuck and told != seen.line.since and first == self._rank:
            tell(
                f"hf_parallel: a wait of {age:.1f} s, longer than steps explain: {chain(self._names, path, heartbeats)} "
                f"How long that takes was never measured, so the run goes on until {self._timeout_s:g} s "
                "(monitor.hang_timeout_s)."
            )
        return seen.line.since

    def _end(self, seen: Seen, age: float, heartbeats: dict[int, dict[str, Any]], bound: float) -> None:
        name, text = self._names[self._rank], seen.line.text
        self._beats.publish(seen, age, self._steps.bound, last=True)
        who = self._board.read("who", STORE_S)
        heartbeats[self._rank] = {**noted(seen, age, self._steps.bound), "last": True}
        trouble = self._board.trouble()
        limit = (
            f"monitor.hang_timeout_s={self._timeout_s:g}"
            if bound == self._timeout_s
            else f"{bound:g} s: {STEPS} times the longest of the last steps, at least monitor.hang_floor_s={self._floor_s:g}"
        )
        axes = self._axes_of(seen.line.awaits or ())
        summary = report(self._names, self._rank, text, age, heartbeats, limit, trouble, axes=axes)
        if self._source:
            summary += f"\nThe settings of {name}: {self._source}."
        prefix = record_prefix(os.environ)
        if prefix is not None:
            summary += (
                f"\nThe last collectives of each rank r that could write them: {prefix}r (torchfrtrace reads them)."
            )
        silent = [rank for rank, heartbeat in heartbeats.items() if heartbeat.get("silent", False)]
        notice = json.dumps({"reason": f"{name} gave up: {text}", "silent": silent, "summary": summary})
        self._board.end(notice)
        self._board.flush(STORE_S if not trouble else 0.0)
        ended = self._board.ended
        if ended is not None and ended != notice:
            self._follow(ended)  # another rank was faster: every rank says the same
        tell(summary)
        kill_silent(silent, who)
        self._leave_record()
        os._exit(EXIT_CODE)

    def _follow(self, reason: str) -> None:
        """End this rank, because another one has ended the job."""
        name, line = self._names[self._rank], self._line
        doing, notice = f"{line.text}, since {time.monotonic() - line.since:.1f} s", json.loads(reason)
        tell(f"hf_parallel: {name} ends, because {notice['reason']}. It was here: {doing}.")
        if "summary" in notice:
            tell(notice["summary"])
        if notice["silent"]:
            kill_silent([rank for rank in notice["silent"] if rank != self._rank], self._board.read("who", STORE_S))
        self._leave_record()
        os._exit(EXIT_CODE)

    def _leave_record(self) -> None:
        """Write the last collectives of this rank, if torch records them; what takes longer than a moment is left out."""
        prefix = record_prefix(os.environ)
        if prefix is not None:
            writer = threading.Thread(target=write_record, args=(f"{prefix}{self._rank}",), daemon=True)
            writer.start()
            writer.join(RECORD_S)


class _WatchThread(threading.Thread):
    """The thread of the watchdog that watches in this process."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(target=watchdog._watch, name="hf_parallel-watchdog", daemon=True)
        self.watchdog, self.pid = watchdog, os.getpid()
