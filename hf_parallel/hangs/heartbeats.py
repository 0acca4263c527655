"""Tells the other ranks what this one does, and watches this rank's calls and the processes of its machine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hf_parallel.compat.private_collectives import blocked_collective, blocked_ranks
from hf_parallel.hangs.blame import LOOK_S, STEPS
from hf_parallel.hangs.noticeboard import NoticeBoard
from hf_parallel.machine.processes import birth_of, host_identity, state_of
from hf_parallel.machine.stacks import activity_of, main_stack, shown_stack


IDLE = "runs outside hf_parallel (data loading, user code)"
STORE_S = 0.4  # longest wait for the store
SILENT_S = 0.8  # in which a rank that lives writes again
# A gap between two ticks that is longer is time in which this process was stopped: nobody else is to blame for it.
STOPPED_S = 2.0
MEASURED = 3  # steps before their times say anything
RECENT = 50  # steps that are remembered
ENDING_S = 0.5  # in which a process whose connection is lost shows how it ended


class Line(NamedTuple):
    """Announcement of what a rank does.

    Attributes:
        waits: Whether it waits for other ranks.
        text: Its activity in words.
        since: Time when the activity began, by this rank's clock.
        awaits: Ranks that it waits for; None if they are not known.
    """

    waits: bool
    text: str
    since: float
    awaits: Sequence[int] | None = None


class Seen(NamedTuple):
    """A line as the thread of the watchdog sees it: with what the stack says of one that lasts, and what the rank has done so far."""

    line: Line
    is_measured: bool
    stack: str
    done: str = ""


class StepTimes:
    """Durations of the last steps, from which follows how long a wait inside a step may last.

    Args:
        floor_s: Seconds that it may last in any case.
        timeout_s: Seconds that it may last at most.
    """

    def __init__(self, floor_s: float, timeout_s: float) -> None:
        self._floor_s, self._timeout_s = floor_s, timeout_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._ended: float | None = None

    def end(self) -> None:
        """End a step and begin the next one."""
        now, before = time.monotonic(), self._ended
        self._ended = now
        if before is not None:
            self._recent.append(now - before)

    def leave_out(self) -> None:
        """Do not measure the present step: since the last one ended, the rank did what is no part of a step."""
        self._ended = None

    @property
    def bound(self) -> float | None:
        """Seconds that a wait may last; None before enough steps were measured, or if the time-out is less."""
        if len(self._recent) < MEASURED:
            return None
        bound = round(max(self._floor_s, STEPS * max(self._recent)), 1)
        return bound if bound < self._timeout_s else None


def see(line: Line, phase: str, stay: Stay) -> Seen:
    """Describe what this rank does, with what its stack says if it has done so for a while.

    Args:
        line: Line that it announced.
        phase: Activity that is no part of a step; empty in a step.
        stay: Measures how long it has been in a collective.
    """
    is_idle = line.text == IDLE
    if not line.waits:
        collective, entered = stay.look()
        if collective is not None:
            text = f"waits for other ranks in {collective}"
            line = Line(True, text if is_idle else f"{line.text}: {text}", max(line.since, entered))
    if time.monotonic() - line.since < LOOK_S:
        return Seen(line, not phase and (line.waits or not is_idle), "")
    stack = main_stack()
    activity = activity_of(stack)
    if line.waits:
        line = line._replace(awaits=line.awaits or blocked_ranks())
    elif activity is not None and (is_idle or not activity.is_measured):
        line = line._replace(text=activity.text if is_idle else f"{line.text}: {activity.text}")
    known = activity.is_measured if activity is not None else line.waits or not is_idle
    return Seen(line, not phase and known, shown_stack(stack))


def noted(seen: Seen, age: float, bound: float | None) -> dict[str, Any]:
    """The message to the other ranks about what this rank does (see `blame`)."""
    line = seen.line
    return {
        "waits": line.waits,
        "text": line.text,
        "age": round(age, 1),
        "awaits": None if line.awaits is None else list(line.awaits),
        "measured": seen.is_measured,
        "stack": seen.stack,
        "done": seen.done,
        "bound": bound,
    }


class Heartbeats:
    """The lines of all ranks, on a notice board.

    Args:
        board: Notice board that has them.
        rank: This rank.
    """

    def __init__(self, board: NoticeBoard, rank: int) -> None:
        self.board, self._rank = board, rank
        self._told: dict[str, Any] = {}

    def publish(self, seen: Seen, age: float, bound: float | None, *, last: bool = False) -> None:
        """Tell what this rank does."""
        self._told = {**noted(seen, age, bound), "last": last}
        self._beat()

    def _beat(self) -> None:
        if self._told:
            self.board.write("heartbeat", json.dumps({**self._told, "at": time.time()}))

    def read(self) -> dict[int, dict[str, Any]]:
        """Each rank's last line; a rank that writes none any more (stopped, or stuck in foreign code) is marked.

        It also lets ranks that stopped at the same moment write their last line. Meanwhile this rank writes on: another one that
        reads at the same moment would take it for silent.
        """
        before = latest = self.board.read("heartbeat", STORE_S)
        deadline = time.monotonic() + SILENT_S
        while latest and time.monotonic() < deadline:
            time.sleep(SILENT_S / 16)
            self._beat()
            latest = self.board.read("heartbeat", STORE_S) or latest
            if all(_is_last(text) or before.get(rank) != text for rank, text in latest.items()):
                break
        lines = {rank: json.loads(text) for rank, text in latest.items()}
        silent = [rank for rank, line in lines.items() if not line["last"] and before.get(rank) == latest[rank]]
        processes = self.processes() if silent else {}
        for rank in silent:
            line, state = lines[rank], state_of(*processes[rank]) if rank in processes else ""
            text = f"silent{f' ({state})' if state else ''}; last seen: {line['text']}"
            line.update(waits=False, silent=True, text=text, measured=line["measured"] or bool(state))
        return lines

    def processes(self) -> dict[int, tuple[int, int | None]]:
        """Number and birth of the process of every other rank that runs on this machine."""
        here, found = list(host_identity()), {}
        for rank, text in self.board.read("who", STORE_S).items():
            *host, pid, birth = json.loads(text)
            if rank != self._rank and host == here and host[0] is not None and pid != os.getpid():
                found[rank] = pid, birth
        return found

    def ends(self, patience_s: float) -> dict[int, str]:
        """Ends of processes of other ranks on this machine, by rank; waits up to `patience_s` for the first."""
        deadline = time.monotonic() + patience_s
        who, found = self.processes(), dict[int, str]()
        while who and not found:
            states = {rank: state_of(*process) for rank, process in who.items()}
            found = {rank: state for rank, state in states.items() if state.startswith("ended")}
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        return found


def _is_last(heartbeat: str) -> bool:
    return bool(json.loads(heartbeat)["last"])


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


class Stay:
    """Measures how long this process has stayed in one collective."""

    def __init__(self) -> None:
        self._call: object = None
        self._since = 0.0

    def look(self) -> tuple[str | None, float]:
        """Name of the collective that a thread is in, or None, and since when it was seen in that very call."""
        call, name = blocked_collective()
        if call != self._call:
            self._call, self._since = call, time.monotonic()
        return name, self._since


def kill_silent(silent: Sequence[int], who: Mapping[int, str]) -> list[int]:
    """Kill the silent ranks of this machine, which nobody else would do for half a minute; the ranks killed.

    Args:
        silent: Ranks that write no heartbeat.
        who: Process of each rank, as the rank wrote it.
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
