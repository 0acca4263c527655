"""The result of a dry run, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hf_parallel.memory.allocations import Peak
from hf_parallel.memory.meter import Meter


GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class Message:
    """Collectives and messages of one kind in a step.

    Args:
        operation: Name of the collective or message, such as "allreduce".
        axis: Axis of the mesh that its ranks are along, such as "tp" or "dp".
        dtype: Dtype of what is sent.
        calls: Number of calls in a step.
        total_bytes: Bytes of the largest tensor of each call on this rank, summed over a step.
    """

    operation: str
    axis: str
    dtype: str
    calls: int
    total_bytes: int


@dataclass(frozen=True)
class Wait:
    """A place where the host waits for the device.

    Args:
        where: Call that it waits in, and its line.
        times: In a step.
    """

    where: str
    times: int


@dataclass(frozen=True)
class DryRun:
    """Costs of one optimizer step of one rank.

    Args:
        rank: In words.
        parameters: Elements of parameters that the rank runs, before ZeRO shares them out.
        peak: Memory when most was taken.
        after_bytes: Memory between two steps.
        messages: Messages sent, the most bytes first.
        waits: Places where the host waits, the most often first.
        is_first: Whether the peak is that of the first step of a run; else of one in its middle.
    """

    rank: str
    parameters: int
    peak: Peak
    after_bytes: int
    messages: tuple[Message, ...]
    waits: tuple[Wait, ...]
    is_first: bool = False

    @property
    def peak_bytes(self) -> int:
        """Most memory of the device at once, without what CUDA and NCCL take themselves."""
        return self.peak.total_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        made = asdict(self)
        peak = made.pop("peak")
        names = ("bytes", "count", "kind", "shape", "dtype", "op", "where")
        made["peak_bytes"], made["peak_by_kind"] = peak["total_bytes"], peak["by_kind"]
        made["largest"] = [dict(zip(names, one, strict=True)) for one in peak["largest"]]
        return made

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{self.rank}: {self.parameters / MB:.3g} million parameters, peak {self.peak_bytes / GB:.2f} GB"
        where = "at the peak, in the first step" if self.is_first else "at the peak"
        yield f"  between steps {self.after_bytes / GB:.2f} GB; {where}:"
        for kind, size in self.peak.by_kind.items():
            yield f"  {size / GB:9.3f} GB  {kind}"
        yield "largest at the peak:"
        for size, count, kind, shape, dtype, op, where in self.peak.largest:
            if where or shape:
                yield f"  {size / GB:9.3f} GB  {count} x {kind} {list(shape)} {dtype} {op} {where}".rstrip()
        yield "messages of a step:"
        for one in self.messages:
            yield f"  {one.calls:6d} x {one.operation:16s} {one.axis or 'alone':8s} {one.total_bytes / MB:12.2f} MB  {one.dtype}"
        yield "the host waits for the device in a step:" if self.waits else "the host waits nowhere for the device."
        for wait in self.waits:
            yield f"  {wait.times:6d} x {wait.where}"


def report_of(rank: str, meter: Meter, parameters: int, first: Peak) -> DryRun:
    """Make a report of what a meter has counted since it began.

    Args:
        rank: In words.
        meter: After a step.
        parameters: Elements that the rank runs.
        first: Peak of the first step, which counts if it is higher.
    """
    later = meter.memory.peak()
    messages = [Message(*key, calls, meter.message_bytes[key]) for key, calls in meter.messages.items()]
    return DryRun(
        rank,
        parameters,
        max(later, first, key=lambda peak: peak.total_bytes),
        meter.memory.now_bytes,
        tuple(sorted(messages, key=lambda one: (-one.total_bytes, -one.calls, one.operation))),
        tuple(Wait(where, times) for where, times in meter.waits.most_common()),
        is_first=first.total_bytes > later.total_bytes,
    )
