"""The report at the end of a run: a JSON file, and a page with a timeline, tables and the settings, without outside links."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hf_parallel.mesh.shape import MeshShape
from hf_parallel.monitor.recorder import COMPUTED, Span, StepRecord
from hf_parallel.monitor.report.metrics import Job, bubbles_of_ranks, exposed_s, metrics_of
from hf_parallel.monitor.report.picture import Arrow, Bar, beside, curve, timeline
from hf_parallel.monitor.report.scaling import Scaled, scaling_picture
from hf_parallel.monitor.report.told import axes_in_use, total_sent
from hf_parallel.monitor.report.trace import Offset, peer_of
from hf_parallel.monitor.report.write import finite, write_whole
from hf_parallel.pipeline_parallel.schedule.simulate import simulate


NAME: Final = "hf_parallel_report"
FORMAT: Final = 1
MOST_ROWS: Final = 16  # ranks in the timeline
SHOWN: Final = ("receive F", "receive B", "loss", "wait reduce", "gather", "shared", "optimizer", "norm", "data")

STYLE: Final = """
:root { --ink: #1d2433; --soft: #5b6577; --line: #d9dee7; --back: #ffffff; --panel: #f5f7fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #343c4a; --back: #161a21; --panel: #1e242e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto; max-width: 1120px; padding: 24px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 32px 0 8px; } p { color: var(--soft); margin: 4px 0 12px; }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.figures div { background: var(--panel); border-radius: 8px; padding: 10px 16px; min-width: 110px; }
.figures b { display: block; font-size: 20px; } .figures span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 13px; } th:first-child, td:first-child { text-align: left; }
pre { background: var(--panel); padding: 12px 16px; border-radius: 8px; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .in { fill: #fff; font-size: 10px; } svg .message { stroke-width: 1; opacity: 0.75; } svg .ideal { fill: none; stroke: #9aa4b5; stroke-dasharray: 4 4; } .grid { stroke: var(--line); } .curve { fill: none; stroke: #2b5fb3; stroke-width: 1.5; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 5px 0 14px; vertical-align: -1px; } .entry { white-space: nowrap; }
@media (max-width: 700px) { body { padding: 16px; } .wide svg { min-width: 760px; } }
"""


def write_report(
    folder: Path,
    job: Job,
    records: Sequence[StepRecord | None],
    offsets: Sequence[Offset],
    history: Sequence[Mapping[str, float]],
    settings: Mapping[str, Any],
    planned_ranks: Sequence[Scaled] = (),
) -> Path:
    """Write both files; on rank 0.

    Args:
        folder: Folder to write to.
        job: Facts that the ranks told of the whole run.
        records: The last step of each rank.
        offsets: Offsets of the ranks' clocks.
        history: The logged metrics.
        settings: Settings of the run.
        planned_ranks: Prediction for 1 rank and more.

    Returns:
        The page.
    """
    origin = _origin(records, offsets)
    measured, arrows = _measured(job, records, offsets, origin), _arrows(job, records, offsets, origin)
    planned = _planned(job, measured)
    drawn: dict[str, Sequence[Arrow | Bar]] = {"planned": planned, "measured": measured, "messages": arrows}
    whole = _content(job, history, settings) | {
        "scaling": [asdict(one) for one in planned_ranks],
        "timeline": {what: [asdict(one) for one in own] for what, own in drawn.items()},
    }
    write_whole(folder / f"{NAME}.json", json.dumps(finite(whole), indent=1))
    names = [job.shape.describe(rank) for rank in range(min(MOST_ROWS, job.shape.world_size))]
    picture = timeline(names, planned, measured, arrows)
    return write_whole(folder / f"{NAME}.html", _page(job, picture, history, settings, planned_ranks))


def _content(job: Job, history: Sequence[Mapping[str, float]], settings: Mapping[str, Any]) -> dict[str, Any]:
    shape = job.shape
    return {
        "format": FORMAT,
        "layout": shape.sizes,
        "settings": dict(settings),
        "metrics": metrics_of(job),
        "ranks": [{"rank": r, "name": shape.describe(r), "bubble": one.bubble, **asdict(one)} for r, one in enumerate(job.told)],
        "stages": {str(stage): asdict(seconds) for stage, seconds in job.of_stages().items()},
        "axes": {
            axis: {"bytes_a_step": total_sent(job.told, axis), "exposed_s": exposed_s(job).get(axis)} for axis in axes_in_use(job.sizes)
        },
        "history": [dict(one) for one in history],
    }  # fmt: skip


def _drawn(records: Sequence[StepRecord | None], offsets: Sequence[Offset]) -> Iterator[tuple[int, Span, float]]:
    """Rank, span and the offset of its clock, of the ranks that are drawn."""
    for rank, (record, offset) in enumerate(zip(records[:MOST_ROWS], offsets, strict=False)):
        for span in record.spans if record is not None else ():
            yield rank, span, offset.seconds


def _origin(records: Sequence[StepRecord | None], offsets: Sequence[Offset]) -> float:
    """Time, on rank 0's clock, at which the first drawn span began."""
    starts = [
        span.start - away for _, span, away in _drawn(records, offsets) if span.kind in COMPUTED or span.kind in SHOWN
    ]
    return min(starts, default=0.0)


def _measured(job: Job, records: Sequence[StepRecord | None], offsets: Sequence[Offset], origin: float) -> list[Bar]:
    """The spans of a step of all ranks, in seconds since the first of them began."""
    found = []
    for rank, span, away in _drawn(records, offsets):
        if span.kind in COMPUTED or span.kind in SHOWN:
            stage = span.number if len(job.stages[rank]) > 1 else ""
            label = f"{stage}{span.kind}{span.microbatch}" if span.kind in COMPUTED else ""
            found.append(Bar(rank, span.kind, label, span.start - away - origin, span.end - away - origin))
    return found


def _arrows(job: Job, records: Sequence[StepRecord | None], offsets: Sequence[Offset], origin: float) -> list[Arrow]:
    """The messages between the ranks that are drawn, from when a rank sends until the other stops waiting for it."""
    sent: dict[tuple[int, int, str, int, int], float] = {}
    taken: list[tuple[int, int, str, int, int, float]] = []
    for rank, span, away in _drawn(records, offsets):
        verb, _, kind = span.kind.rpartition(" ")
        peer = peer_of(span, job.choice.placement)
        if peer is None:
            continue
        dp_rank, _, tp_rank, sp_rank = job.shape.coordinates(rank)
        other = job.shape.rank_at(dp_rank, peer, tp_rank, sp_rank)
        if verb == "send":
            sent[rank, other, kind, span.number, span.microbatch] = span.start - away - origin
        else:
            maker = span.number + (-1 if kind == "F" else 1)
            taken.append((other, rank, kind, maker, span.microbatch, span.end - away - origin))
    return [
        Arrow(
            f"{kind}{microbatch} of stage {stage}",
            kind,
            source,
            sent[source, target, kind, stage, microbatch],
            target,
            end,
        )
        for source, target, kind, stage, microbatch, end in taken
        if (source, target, kind, stage, microbatch) in sent
    ]


def _planned(job: Job, measured: Sequence[Bar]) -> list[Bar]:
    """The planned step of the ranks that are drawn: as much compute as was measured, from the first action on."""
    expected, count = job.expected, round(job.told[0].microbatches)
    computed = [bar for bar in measured if bar.kind in COMPUTED]
    if not expected.forward or not count or not computed or not job.choice.drains:
        return []
    timed = simulate(job.choice.training(count), expected.forward, expected.backward, weight_costs=expected.weights)
    ranks = range(min(MOST_ROWS, job.shape.world_size))
    places = [job.shape.coordinates(rank)[1] for rank in ranks]
    scale = sum(bar.end - bar.start for bar in computed) / sum(timed.busy[place] for place in places)
    begin, found = min(bar.start for bar in computed), []
    for rank, place in zip(ranks, places, strict=True):
        several = len(job.stages[rank]) > 1
        for action, start, end in zip(timed.schedule[place], timed.starts[place], timed.ends[place], strict=True):
            label = f"{action.stage if several else ''}{action.kind}{action.microbatch}"
            found.append(Bar(rank, action.kind, label, begin + scale * start, begin + scale * end))
    return found


def _page(
    job: Job,
    picture: str,
    history: Sequence[Mapping[str, float]],
    settings: Mapping[str, Any],
    planned_ranks: Sequence[Scaled],
) -> str:
    shape = job.shape
    title = _layout(shape)
    left_out = max(0, shape.world_size - MOST_ROWS)
    parts = [
        f"<h1>hf_parallel: {title}</h1>",
        f"<p>{job.told[0].steps:.0f} steps were measured; the first ones may be left out.</p>",
        _figures(job),
        "<h2>One step</h2>",
        f"<p>The last step, planned above measured for each rank{f'; {left_out} ranks more are not drawn' if left_out else ''}. The "
        "plan has the same compute in all, shared out as the cut was planned, and no messages. Arrows are the messages of the measured "
        "step, from the moment when one is sent to that when the stage that waits has it.</p>",
        picture,
        "<h2>Ranks</h2>",
        _ranks(job),
        "<h2>Memory</h2>",
        _memory(job),
        _stages(job),
        "<h2>Messages of a step</h2>",
        _axes(job),
        curve("Tokens per second", [(one["step"], one["monitor/tokens_per_s"]) for one in history]),
        _scaling(job, planned_ranks),
        "<h2>Settings</h2>",
        f"<pre>{html.escape(json.dumps(settings, indent=2))}</pre>",
    ]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><link rel='icon' href='data:,'><title>hf_parallel: {title}</title>"
    return f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def _figures(job: Job) -> str:
    found = metrics_of(job)

    def figure(name: str, what: str, form: str) -> str:
        value = found.get(f"monitor/{name}")
        return "" if value is None else f"<div><b>{form.format(value)}</b><span>{what}</span></div>"

    shown = (
        figure("tokens_per_s", "tokens per second", "{:,.0f}"),
        figure("step_s", "seconds per step", "{:.3g}"),
        figure("mfu", "model FLOP/s utilisation", "{:.1%}"),
        figure("hfu", "hardware FLOP/s utilisation", "{:.1%}"),
        figure("tflops", "model TFLOP/s of a rank", "{:.3g}"),
        figure("bubble_planned", "bubble, planned", "{:.0%}"),
        figure("bubble_of_stages", "bubble at the stages' measured times", "{:.0%}"),
        figure("bubble", "bubble, measured", "{:.0%}"),
    )
    return f"<div class='figures'>{''.join(shown)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{cells}</tr>{body}</table></div>"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1.0 else f"{1e3 * seconds:.3g}"


def _ranks(job: Job) -> str:
    head = [
        "rank",
        "computes ms",
        "bubble",
        "data ms",
        "replicas ms",
        "layers ms",
        "update ms",
        "peak GB",
        "expected GB",
    ]
    rows = []
    for rank, one in enumerate(job.told):
        layers = one.layers_s + one.sequence_s + one.experts_s
        times = [_ms(one.data_s), _ms(one.reduced_s), _ms(layers), _ms(one.optimizer_s)]
        bubble = f"{one.bubble:.1%}" if one.window_s else "none"
        sizes = [f"{one.memory_bytes / 1e9:.3g}", f"{one.expected_bytes / 1e9:.3g}"]
        rows.append([job.shape.describe(rank), _ms(one.busy_s), bubble, *times, *sizes])
    note = (
        "<p>Of a step: compute, idle share of the schedule, and waits (in layers: for shards, parts of rows, experts). On GPUs the peak is that of tensors, on CPUs what the "
        "process took beyond what it had before the first step, and its weights; expected are weights, gradients, Adam's states and, with stages, activations.</p>"
    )
    return note + _table(head, rows)


def _memory(job: Job) -> str:
    rows = [
        (job.shape.describe(rank), one.expected_bytes / 1e9, one.memory_bytes / 1e9)
        for rank, one in enumerate(job.told[:MOST_ROWS])
    ]
    return "<p>Peak of each rank, planned above measured.</p>" + beside(rows, "GB")


def _layout(shape: MeshShape) -> str:
    sequence = f" x sp {shape.sp_size}" if shape.sp_size > 1 else ""
    experts = f", ep {shape.ep_size}" if shape.ep_size > 1 else ""
    return f"tp {shape.tp_size} x pp {shape.pp_size}{sequence} x dp {shape.dp_size}{experts}"


def _scaling(job: Job, planned: Sequence[Scaled]) -> str:
    if not planned:
        return ""
    ranks, reached = job.shape.world_size, job.tokens_per_s
    rows = [
        [
            str(one.ranks),
            one.layout,
            f"{one.tokens_per_s:,.0f}",
            f"{one.speed_up:.2f}",
            f"{one.memory_bytes / 1e9:.3g}",
        ]
        for one in planned
    ]
    memory = max(one.memory_bytes for one in job.told) / 1e9
    layout = f"this run: {_layout(job.shape)}"
    rows.append([str(ranks), layout, f"{reached:,.0f}", "", f"{memory:.3g}"])
    note = (
        "<p>What the planner says of 1 rank and more of this kind, each with as many rows as in this run: the fastest layout that "
        "fits, and its tokens per second. It knows GPUs by their data sheets, and of CPUs only how they compare with themselves.</p>"
    )
    head = ["ranks", "layout", "tokens per second", "speed-up", "GB of the fullest rank"]
    return "<h2>Scaling</h2>" + note + scaling_picture(planned, ranks, reached) + _table(head, rows)


def _stages(job: Job) -> str:
    stages, expected = job.of_stages(), job.expected
    total = sum(s.forward + s.backward + s.weight for s in stages.values()) or 1.0
    costs = sum(expected.forward) + sum(expected.backward) or 1.0
    rows = []
    for stage, seconds in stages.items():
        share = f"{(seconds.forward + seconds.backward + seconds.weight) / total:.1%}"
        planned = f"{(expected.forward[stage] + expected.backward[stage]) / costs:.1%}" if expected.forward else ""
        rows.append([str(stage), _ms(seconds.forward), _ms(seconds.backward), _ms(seconds.weight), share, planned])
    head = ["stage", "forward ms", "backward ms", "weight ms", "share", "planned share"]
    return "<h2>Stages</h2><p>Of one microbatch.</p>" + _table(head, rows)


def _axes(job: Job) -> str:
    exposed, rows = exposed_s(job), []
    for axis in axes_in_use(job.sizes):
        seconds = _ms(exposed[axis]) if axis in exposed else "not known"
        rows.append([axis, f"{total_sent(job.told, axis) / 1e6:.4g}", seconds])
    idle = ", ".join(f"{bubble:.0%}" for bubble in bubbles_of_ranks(job)) if job.shape.pp_size > 1 else ""
    note = f"<p>Measured bubble of the pipeline ranks: {idle}.</p>" if idle else ""
    return _table(["axis", "MB of all ranks", "ms that they add"], rows) + note
