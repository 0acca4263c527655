"""Turns a hang into a named failure within a stated bound.

Each rank keeps one line of status ("waits at stage 1 for the activation of microbatch 3 from stage 0"). A thread publishes
it to the job's key-value store. When this rank has waited for another one longer than `timeout_s`, the thread reads
everybody's line, prints who is being waited for and what that rank was last seen doing, and ends the process; the
launcher then takes the rest of the job down. A thread, because the main one may be inside a collective that never
returns; `os._exit`, because such a call cannot be interrupted. Waits that nobody announced (in stock code, in a
tensor-parallel layer) are found on the stacks of this process: a thread that stays in one collective is waiting.

The clock is this rank's own, and the store is asked through a `NoticeBoard`, which answers in time or not at all: a machine
that is cut off from the store ends by itself. Who gives up tells the others, so that ranks whose watchdog still runs end
too, whoever launched them; a process of the same machine that writes no heartbeat (stopped, or stuck in code that lets no
thread run) is killed, because it would keep a launcher waiting until that kills it.

A rank that dies instead takes its connections with it. What the others then get from their collectives becomes a
`RankFailure` that names the rank: an uncaught exception is noted in the store before its process ends.

One thread of a process watches at a time: a run that begins, or is used again, takes over from the one before.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hf_parallel.compat.private_collectives import blocked_collective, is_connection_loss
from hf_parallel.errors import RankFailure
from hf_parallel.machine.processes import birth_of, host_identity
from hf_parallel.noticeboard import NoticeBoard


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from torch.distributed.distributed_c10d import Store


EXIT_CODE = 86
IDLE = "runs outside hf_parallel (data loading, user code)"
LEFT = "has left the run"
# A heartbeat every tick. From the end of a wait to the end of this process pass at most 2 s: a tick until it is noticed, the
# time for silent ranks to write again, and the time in which an unreachable store may fail to answer.
TICK_S = 0.4
SILENT_S = 0.8
STORE_S = 0.4
# In which the process of a rank that has raised what others cannot know of may end by itself.
LEFT_S = 5.0
# A gap between two ticks that is longer is time in which this process was stopped: nobody else is to blame for it.
STOPPED_S = 2.0


class Watchdog:
    """Watches this rank's waits.

    Args:
        store: Store shared by all ranks; a private clone, since a blocked call on the main thread's would block it too.
        rank: This rank.
        names: Words for every rank, in rank order, such as `rank 1 (pp 1 of 2)`.
        timeout_s: Longest wait, in seconds, before the job is ended. The job dies at most 2 s later than that.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = list(names)
        self._timeout_s = timeout_s
        self._line: tuple[bool, str, float] = (False, IDLE, time.monotonic())
        self._stop = threading.Event()
        self._thread: _WatchThread | None = None
        self._made_board: NoticeBoard | None = None
        self._resting = self._stopped = False
        self._left: tuple[str, float] | None = None

    @property
    def _board(self) -> NoticeBoard:
        if self._made_board is None:
            self._made_board = NoticeBoard(self._store, self._rank, len(self._names))
        return self._made_board

    def waits(self, text: str) -> None:
        """From now on this rank waits for others, for the reason `text`."""
        self._line = (True, text, time.monotonic())
        if self._resting:
            self.start()

    def runs(self, text: str = IDLE) -> None:
        """From now on this rank works by itself on `text`."""
        self._line = (False, text, time.monotonic())
        if self._resting:
            self.start()

    def leaves_others(self, text: str) -> None:
        """This rank raises `text` while others wait for it in a layer, which nothing but its end will tell them.

        If it goes on all the same, because user code has caught the error, the job ends after `LEFT_S`.
        """
        self._left = text, time.monotonic()

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Mark a block that waits for other ranks, and in which only they can break a connection."""
        before = self._line
        self.waits(text)
        try:
            with self.naming_losses():
                yield
        finally:
            self._line = (before[0], before[1], time.monotonic())

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """Mark a call into the engine: whatever it announced last, afterwards this rank works for itself again.

        Code of the user runs inside: what that raises stays what it is.
        """
        try:
            with self.naming_losses(in_collective=False):
                yield
        finally:
            self.runs()

    @contextmanager
    def naming_losses(self, *, in_collective: bool = True) -> Iterator[None]:
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
        """Who is gone, as far as is known: a rank that raised has said so, one that died is one of the others."""
        failed = self._board.read("failed")
        others = [rank for rank in range(len(self._names)) if rank != self._rank]
        known = ", ".join(f"{self._names[rank]}, which failed with {text}" for rank, text in failed.items())
        few = len(others) <= 8
        one_of = ", ".join(self._names[rank] for rank in others) if few else f"the {len(others)} others"
        lost = known or (one_of if len(others) == 1 else f"a rank, one of {one_of}")
        text = self._line[1]
        where = f" It {text}." if text != IDLE else ""
        return (
            f"{self._names[self._rank]} lost {lost}.{where} Look for the first error of that rank; if it left none, it "
            f"was killed (out of memory?) or ended by itself. ({error})"
        )

    def start(self) -> None:
        """Start the thread and name this rank in the report of an uncaught exception; a run before this one rests."""
        if self._thread is not None or self._stopped:
            return
        self._resting = False
        self._name_uncaught_exceptions()
        if self._store is None or len(self._names) < 2:
            return
        for thread in threading.enumerate():
            if isinstance(thread, _WatchThread):
                thread.watchdog.rest()
        self._stop.clear()
        self._board.write("who", json.dumps([*host_identity(), os.getpid(), birth_of(os.getpid())]))
        self._publish(False, self._line[1], 0.0)  # a process that stops before its first tick is missed from here on
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
        self._line = (False, LEFT, time.monotonic()) if self._stopped else self._line
        self._publish(False, LEFT, 0.0, last=True)
        self._board.close()

    def _watch(self) -> None:
        tick = max(0.05, min(TICK_S, self._timeout_s / 4))
        stay, excuse, looked = Stay(), Excuse(), time.monotonic()
        while not self._stop.wait(tick):
            now = time.monotonic()
            excuse.note(self._line, now - looked - tick)
            looked = now
            waits, text, since = self._line
            if not waits:
                collective, entered = stay.look()
                if collective is not None:
                    waits, text, since = True, f"{text}: waits for other ranks in {collective}", max(since, entered)
            age = now - since - excuse.seconds
            self._publish(waits, text, age)
            if waits and age > self._timeout_s:
                self._end(text, age)
            if self._left is not None and now - self._left[1] > LEFT_S:
                self._board.end(
                    json.dumps({"reason": f"{self._names[self._rank]} raised: {self._left[0]}", "silent": []})
                )
            if self._board.ended is not None:
                self._follow(self._board.ended)

    def _publish(self, waits: bool, text: str, age: float, *, last: bool = False) -> None:
        heartbeat = {"waits": waits, "text": text, "age": round(age, 1), "at": time.time(), "last": last}
        self._board.write("heartbeat", json.dumps(heartbeat))

    def _heartbeats(self) -> dict[int, dict[str, Any]]:
        """Each rank's last line; a rank that writes none any more (stopped, or stuck in foreign code) is marked.

        It also lets ranks that stopped at the same moment write their last line.
        """
        before = latest = self._board.read("heartbeat", STORE_S)
        deadline = time.monotonic() + SILENT_S
        while latest and time.monotonic() < deadline:
            time.sleep(SILENT_S / 16)
            latest = self._board.read("heartbeat", STORE_S) or latest
            if all(_is_last(text) or before.get(rank) != text for rank, text in latest.items()):
                break
        heartbeats = {rank: json.loads(text) for rank, text in latest.items()}
        for rank, heartbeat in heartbeats.items():
            if not heartbeat["last"] and before.get(rank) == latest[rank]:
                heartbeat.update(waits=False, silent=True, text=f"silent; last seen: {heartbeat['text']}")
        return heartbeats

    def _end(self, text: str, age: float) -> None:
        name = self._names[self._rank]
        self._publish(True, text, age, last=True)
        who, heartbeats = self._board.read("who", STORE_S), self._heartbeats()
        heartbeats[self._rank] = {"waits": True, "text": text, "age": round(age, 1), "last": True}
        trouble = self._board.trouble()
        _tell(report(self._names, self._rank, text, age, heartbeats, self._timeout_s, trouble))
        silent = [rank for rank, heartbeat in heartbeats.items() if heartbeat.get("silent", False)]
        self._board.end(json.dumps({"reason": f"{name} gave up: {text}", "silent": silent}))
        kill_silent(silent, who)
        self._board.flush(STORE_S if not trouble else 0.0)
        os._exit(EXIT_CODE)

    def _follow(self, reason: str) -> None:
        """End this rank, because another one has ended the job."""
        name, (_, text, since) = self._names[self._rank], self._line
        doing, notice = f"{text}, since {time.monotonic() - since:.1f} s", json.loads(reason)
        message = f"hf_parallel: {name} ends, because {notice['reason']}. It was here: {doing}."
        _tell(message)
        if notice["silent"]:
            kill_silent([rank for rank in notice["silent"] if rank != self._rank], self._board.read("who", STORE_S))
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
                self._board.write("failed", f"{kind.__name__}: {error}")
                self._board.flush()
            previous(kind, error, trace)
            _tell(f"hf_parallel: {name} failed: {type(error).__name__}: {error}")

        hook.hf_parallel, hook.previous = True, previous  # type: ignore[attr-defined]
        sys.excepthook = hook


def _tell(text: str) -> None:
    """To stderr at once: the process may end before a logger's handlers have run."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _WatchThread(threading.Thread):
    """The thread of the watchdog that watches in this process."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(target=watchdog._watch, name="hf_parallel-watchdog", daemon=True)
        self.watchdog, self.pid = watchdog, os.getpid()


class Excuse:
    """Seconds of the present wait in which this process itself was stopped."""

    def __init__(self) -> None:
        self._line: object = None
        self.seconds = 0.0

    def note(self, line: object, gap: float) -> None:
        """Count a gap between two looks at `line`."""
        if line is not self._line:
            self._line, self.seconds = line, 0.0
        if gap > STOPPED_S:
            self.seconds += gap


def _is_last(heartbeat: str) -> bool:
    return bool(json.loads(heartbeat)["last"])


def kill_silent(silent: Sequence[int], who: Mapping[int, str]) -> list[int]:
    """Kill the silent ranks of this machine, which nobody else would do for half a minute; the ranks killed.

    Args:
        silent: Ranks that write no heartbeat.
        who: What each rank wrote about its process.
    """
    killed = []
    for rank in silent:
        *host, pid, birth = json.loads(who.get(rank, "[null, null, 0, null]"))
        is_here = host[0] is not None and host == list(host_identity()) and pid != os.getpid()
        # Process numbers are used again: it is the same process if it was born at the same tick.
        if is_here and birth is not None and birth_of(pid) == birth:
            with suppress(OSError):  # it is gone already, or another user's
                os.kill(pid, signal.SIGKILL)
                killed.append(rank)
    return killed


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
    names: Sequence[str],
    rank: int,
    text: str,
    age: float,
    heartbeats: Mapping[int, Mapping[str, Any]],
    timeout_s: float,
    trouble: str = "",
) -> str:
    """The message of a hang: who waits, for what, and what every rank was last seen doing.

    Args:
        names: Words for every rank.
        rank: Who gives up.
        text: What it waits for.
        age: How long, in seconds.
        heartbeats: The last line of each rank that is known.
        timeout_s: The longest wait allowed.
        trouble: What is wrong with the store that lines come from; empty if nothing.
    """
    stuck = [r for r in range(len(names)) if r != rank and (r not in heartbeats or not heartbeats[r]["waits"])]
    lines = [f"hf_parallel: {names[rank]} gave up: {text}, for {age:.1f} s (monitor.hang_timeout_s={timeout_s:g})."]
    if trouble:
        lines.append(f"{trouble[0].upper()}{trouble[1:]}, so what other ranks do is not known from here.")
    elif stuck:
        lines.append("The job waits for: " + ", ".join(names[r] for r in stuck) + ".")
    for other in range(len(names)):
        heartbeat = heartbeats.get(other)
        seen = (
            f"{heartbeat['text']}, since {heartbeat['age']:.1f} s"
            if heartbeat
            else "not known"
            if trouble
            else "never seen"
        )
        lines.append(f"  {names[other]}: {seen}")
    if trouble:
        lines.append("Look at the network between the machines, and at what the ranks of the other machines say.")
    else:
        lines.append(
            "If that rank is only slow (a long evaluation, a first compilation), raise monitor.hang_timeout_s."
        )
    return "\n".join(lines)
