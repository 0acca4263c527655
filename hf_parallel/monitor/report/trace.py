"""One trace of all ranks on one clock, as Chrome and Perfetto read it, and how far their clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from hf_parallel.mesh.shape import MeshShape
from hf_parallel.monitor.recorder import COMPUTED, Span, StepRecord


PINGS: Final = 5
LANES: Final = ("computes", "waits", "sends", "reduces", "data and updates")


@dataclass(frozen=True)
class Offset:
    """Difference of a rank's clock from rank 0's.

    Attributes:
        seconds: To be subtracted from its times.
        error_s: Half of the round trip, which bounds the error.
    """

    seconds: float
    error_s: float


def clock_offsets(group: dist.ProcessGroup) -> list[Offset]:
    """Clock offset of every rank, on rank 0; empty elsewhere. Collective over a group of gloo, and of the world.

    Rank 0 sends each rank a message, which comes back with that rank's clock; the shortest of a few round trips counts.
    """
    rank, size = group.rank(), group.size()
    message = torch.zeros(1, dtype=torch.float64)
    if rank:
        for _ in range(PINGS):
            dist.recv(message, group=group, group_src=0)
            message[0] = time.perf_counter()
            dist.send(message, group=group, group_dst=0)
        return []
    found = [Offset(0.0, 0.0)]
    for other in range(1, size):
        best = Offset(0.0, float("inf"))
        for _ in range(PINGS):
            before = time.perf_counter()
            dist.send(message, group=group, group_dst=other)
            dist.recv(message, group=group, group_src=other)
            after = time.perf_counter()
            if (after - before) / 2 < best.error_s:
                best = Offset(float(message[0]) - (before + after) / 2, (after - before) / 2)
        found.append(best)
    return found


def name_of(span: Span, names_stage: bool, target: int | None = None) -> str:
    """A span in words, such as F2, send F2 to 1, reduce bucket 3.

    Args:
        span: The span.
        names_stage: Whether its rank holds several stages, so that the action says which: 3F2. A message goes by the action that
            made it, at both of its ends.
        target: World rank that a message goes to, or comes from.
    """
    verb, _, kind = span.kind.rpartition(" ")
    stage = span.number
    if verb == "receive":
        stage -= 1 if kind == "F" else -1
    action = f"{stage if names_stage else ''}{kind}{span.microbatch}"
    if span.kind in COMPUTED:
        return action
    if verb in ("send", "receive"):
        way = "to" if verb == "send" else "from"
        return f"{verb} {action} {way} {target}"
    if span.kind in ("reduce", "wait reduce"):
        return f"{span.kind} bucket {span.number}"
    return {
        "drain": "wait for sends to arrive",
        "loss": "wait for the loss",
        "shared": "sum shared gradients",
        "gather": "wait for parameters",
        "norm": "gradient norm",
        "tp": "sum over shards",
        "sp": "exchange parts of rows",
        "ep": "exchange tokens of experts",
    }.get(span.kind, span.kind)


def _lane(kind: str) -> int:
    if kind in COMPUTED:
        return 0
    if kind.startswith("send"):
        return 2
    if kind == "reduce":
        return 3
    return 4 if kind in ("data", "optimizer", "norm", "schedule") else 1


def chrome_trace(
    records: Sequence[Sequence[StepRecord]], offsets: Sequence[Offset], shape: MeshShape, placement: Sequence[int]
) -> dict[str, Any]:
    """The events of all ranks: a process is a rank, a thread is a lane.

    Args:
        records: Records of each rank.
        offsets: Clock offset of each rank.
        shape: Shape of the mesh.
        placement: Pipeline rank of each stage.
    """
    events: list[dict[str, Any]] = []
    shifted = [[step.start - offset.seconds for step in own] for own, offset in zip(records, offsets, strict=True)]
    origin = min((start for own in shifted for start in own), default=0.0)
    for rank, (own, offset) in enumerate(zip(records, offsets, strict=True)):
        dp_rank, pp_rank, tp_rank, sp_rank = shape.coordinates(rank)
        several = sum(place == pp_rank for place in placement) > 1
        about = {"ph": "M", "pid": rank, "tid": 0}
        events.append(about | {"name": "process_name", "args": {"name": shape.describe(rank)}})
        events.append(about | {"name": "process_sort_index", "args": {"sort_index": rank}})
        events += [about | {"tid": i, "name": "thread_name", "args": {"name": lane}} for i, lane in enumerate(LANES)]
        for step in own:
            for span in step.spans:
                peer = peer_of(span, placement)
                target = None if peer is None else shape.rank_at(dp_rank, peer, tp_rank, sp_rank)
                event = {"ph": "X", "cat": span.kind, "pid": rank, "tid": _lane(span.kind)}
                event |= {"name": name_of(span, several, target), "args": _arguments(span, step.number)}
                event |= {"ts": 1e6 * (span.start - offset.seconds - origin), "dur": 1e6 * max(0.0, span.seconds)}
                events.append(event)
    clocks = [{"offset_s": offset.seconds, "error_s": offset.error_s} for offset in offsets]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _arguments(span: Span, step: int) -> dict[str, int]:
    what = "bucket" if "reduce" in span.kind else "stage"
    found = {"step": step, what: span.number, "microbatch": span.microbatch}
    return {name: value for name, value in found.items() if value >= 0}


def peer_of(span: Span, placement: Sequence[int]) -> int | None:
    """Pipeline rank at the other end of a message; None if it is no message."""
    verb, _, kind = span.kind.rpartition(" ")
    if verb not in ("send", "receive"):
        return None
    down = (kind == "F") == (verb == "send")  # towards the last stage
    return placement[span.number + (1 if down else -1)]
