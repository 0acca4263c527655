"""Records when a rank does what, step by step: actions of the schedule, waits, reductions, the optimizer, the data loader.

On a CPU a moment is a number of the clock. On CUDA it is an event on the stream that computes, so what is measured is the
device's time, and no step waits for the device: events are read after they have passed, one or more steps later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch


if TYPE_CHECKING:
    from collections.abc import Iterator


Axis: TypeAlias = Literal["dp", "pp", "tp", "sp", "ep"]
AXES: Final[tuple[Axis, ...]] = ("dp", "pp", "tp", "sp", "ep")
# Spans of these names are collectives inside of what a rank computes.
IN_LAYERS: Final = frozenset({"tp", "sp", "ep"})
COMPUTED: Final = frozenset("FBIW")  # actions of a schedule
MOST_PENDING: Final = 64  # steps whose events have not passed; more are dropped, since nobody asks for them


class Span(NamedTuple):
    """A span of time in which a rank did something, or waited for it.

    Attributes:
        kind: "F", "B", "I", "W" (an action); "receive F", "receive B" (a wait for a message, and what it is), "send F", "send B"
            (its start), "drain" (a wait until sends have arrived); "reduce" (a bucket under way), "wait reduce" (the wait for
            it), "shared" (the sum of gradients that stages share), "gather" (a wait for updated parameters); "tp", "sp", "ep" (a
            collective in a layer: of shards, of parts of rows, of tokens for experts); "loss" (the wait for the last stage's); "schedule", "optimizer", "data".
        number: Number of the stage, or of the bucket; -1 if there is none.
        microbatch: Number of the microbatch; -1 if there is none.
        start: Seconds on this rank's clock.
        end: Seconds on the same clock.
    """

    kind: str
    number: int
    microbatch: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class StepRecord:
    """A step that is over.

    Attributes:
        number: Number of the step.
        start: Seconds on this rank's clock, as `end`.
        spans: In the order in which they ended.
    """

    number: int
    start: float
    end: float
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A step whose moments may be events that have not passed."""

    number: int
    host_start: float
    origin: Any
    host_end: float = 0.0
    last: Any = None
    raw: list[tuple[str, int, int, Any, Any]] = field(default_factory=list)


class Recorder:
    """Records the steps of one rank.

    Args:
        device: Device of the model.
        on: Whether anything is recorded; else every call returns at once.

    Attributes:
        mark: The present moment, to be given to `add` as a start.
        sent: Bytes that were handed to collectives, by axis, where nobody else counts them.
    """

    def __init__(self, device: torch.device, *, on: bool = True) -> None:
        self.on = on
        self.sent: dict[Axis, int] = dict.fromkeys(AXES, 0)
        self._on_device = on and device.type == "cuda"
        self._device = device
        self._step: _Open | None = None
        self._pending: list[_Open] = []
        self._pool: list[Any] = []
        self.mark: Callable[[], Any] = (self._event if self._on_device else time.perf_counter) if on else lambda: None

    def _event(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, index: int, microbatch: int, start: Any) -> None:
        """Record a span that began at `start` and ends now; see `Span` for the words."""
        if self._step is not None:
            self._step.raw.append((kind, index, microbatch, start, self.mark()))

    def add_on_host(self, kind: str, start: float) -> None:
        """Add a span of the host alone; `start` is of `time.perf_counter`."""
        if self._step is not None:
            self._step.raw.append((kind, -1, -1, start, time.perf_counter()))

    @contextmanager
    def span(self, kind: str, index: int = -1) -> Iterator[None]:
        """Record a block that does not raise."""
        start = self.mark()
        yield
        self.add(kind, index, -1, start)

    def count(self, axis: Axis, num_bytes: int) -> None:
        """Note that bytes were handed to a collective."""
        if self.on:
            self.sent[axis] += num_bytes

    @property
    def is_open(self) -> bool:
        """Whether a step has begun."""
        return self._step is not None

    def begin_step(self, number: int, *, waits: bool = False) -> None:
        """Begin a step; one that did not end is dropped.

        Args:
            number: Number of the step.
            waits: Whether to wait for the device, so that its events and the host's clock have one origin.
        """
        if not self.on:
            return
        if waits and self._on_device:
            torch.cuda.synchronize(self._device)
        origin = self.mark()
        self._step = _Open(number, time.perf_counter(), origin)

    def end_step(self) -> None:
        """End the step."""
        step, self._step = self._step, None
        if step is None:
            return
        step.last, step.host_end = self.mark(), time.perf_counter()
        self._pending.append(step)
        if len(self._pending) > MOST_PENDING:
            self._reuse(self._pending.pop(0))

    def finished(self) -> list[StepRecord]:
        """The steps that are over and were not returned before; does not wait for the device."""
        found = []
        while self._pending and (not self._on_device or self._pending[0].last.query()):
            step = self._pending.pop(0)
            found.append(self._read(step))
            if self._on_device:
                self._reuse(step)
        return found

    def settle(self) -> None:
        """Wait for the device, so that `finished` returns every step."""
        if self._on_device:
            torch.cuda.synchronize(self._device)

    def _read(self, step: _Open) -> StepRecord:
        if not self._on_device:
            return StepRecord(step.number, step.host_start, step.host_end, [Span(*one) for one in step.raw])

        def seconds(moment: Any) -> float:
            if isinstance(moment, float):
                return moment
            return step.host_start + float(step.origin.elapsed_time(moment)) / 1e3

        spans = [Span(kind, index, mb, seconds(start), seconds(end)) for kind, index, mb, start, end in step.raw]
        return StepRecord(step.number, step.host_start, max(step.host_end, seconds(step.last)), spans)

    def _reuse(self, step: _Open) -> None:
        """Take back the events of a step, which have been read or never will be."""
        moments = [step.origin, step.last, *(moment for one in step.raw for moment in one[3:])]
        self._pool += {id(moment): moment for moment in moments if not isinstance(moment, float)}.values()


def silent() -> Recorder:
    """Make a recorder that records nothing."""
    return Recorder(torch.device("cpu"), on=False)
