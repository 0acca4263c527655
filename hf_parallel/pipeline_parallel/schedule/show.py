"""Pictures of timed schedules: coloured text, SVG and PNG by matplotlib, and a Chrome trace, all from the simulator's spans."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.text import Text

from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.schedule.actions import Action, Kind
from hf_parallel.pipeline_parallel.schedule.simulate import Simulation, peak_activations


# Fill and ink of each kind, for a rank's 1st, 3rd, ... stage and for its 2nd, 4th, ...
COLORS: Final[Mapping[Kind, tuple[tuple[str, str], tuple[str, str]]]] = {
    "F": (("#2b5fb3", "#ffffff"), ("#9dc0f2", "#000000")),
    "B": (("#2e7d4f", "#ffffff"), ("#93d6ad", "#000000")),
    "I": (("#167a7f", "#ffffff"), ("#8fdadd", "#000000")),
    "W": (("#b35412", "#ffffff"), ("#f5c08f", "#000000")),
}
KIND_NAMES: Final[Mapping[Kind, str]] = {
    "F": "f: forward",
    "B": "b: backward",
    "I": "i: gradients of the inputs",
    "W": "w: gradients of the weights",
}
MICROSECONDS_A_UNIT = 1000.0


@dataclass(frozen=True)
class _Bar:
    """One action in a picture: where it stands and its colours."""

    rank: int
    action: Action
    start: float
    end: float
    fill: str
    ink: str


def columns_per_unit(results: Iterable[Simulation], width: int, *, in_colour: bool = True) -> float:
    """Return the text columns of one time unit that let all the results fit ``width`` columns.

    Where there is room, the shortest action takes a whole number of columns. Without colours it always has room for the
    letter of its kind, whatever the width: nothing else tells kinds apart.
    """
    results = list(results)
    scale = width / (max(result.makespan for result in results) or 1.0)
    lengths = [bar.end - bar.start for result in results for bar in _bars(result) if bar.end > bar.start]
    shortest = min(lengths, default=0.0)
    most = max((bar.action.microbatch for result in results for bar in _bars(result)), default=0)
    letters = len(str(most)) + 1
    if shortest and not in_colour and scale * shortest < letters:
        return letters / shortest
    return math.floor(scale * shortest) / shortest if scale * shortest >= 1.0 else scale


def timeline_text(result: Simulation, *, scale: float) -> Text:
    """Return one row a rank, time from left to right.

    An action shows its microbatch (the last digits where it is short), then its kind in small letters as far as it lasts; idle time is dots. Later stages of
    a rank have lighter colours.

    Args:
        result: Result of `simulate`.
        scale: Text columns of one time unit, as `columns_per_unit` returns them.
    """
    rows = [Text(f"rank {rank:<2} ") for rank in range(len(result.schedule))]
    column = [0] * len(rows)
    for bar in _bars(result):
        start, end = round(bar.start * scale), round(bar.end * scale)
        digits = str(bar.action.microbatch)[start - end :] if end > start else ""
        rows[bar.rank].append("." * (start - column[bar.rank]), style="dim")
        rows[bar.rank].append(digits.ljust(end - start, bar.action.kind.lower()), style=f"{bar.ink} on {bar.fill}")
        column[bar.rank] = end
    for row, end in zip(rows, column, strict=True):
        row.append("." * (round(result.makespan * scale) - end), style="dim")
    return Text("\n").join(rows)


def write_picture(path: str | Path, results: Mapping[str, Simulation], kind: Literal["png", "svg"]) -> None:
    """Write the schedules, one above the other on one time axis, as a picture.

    Args:
        path: The file to write.
        results: Title to timed schedule.
        kind: Format of the file, whatever its name.

    Raises:
        UnsupportedError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UnsupportedError(
            f"{path}: a picture needs matplotlib, which is not installed. Run pip install 'hf_parallel[viz]', or use --trace, "
            "which needs nothing."
        ) from None
    heights = [len(result.schedule) + 1 for result in results.values()]
    figure = Figure(figsize=(14, 0.32 * sum(heights) + 0.6 * len(heights) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (title, result) in zip(grid[:, 0], results.items(), strict=True):
        axes.set_title(f"{title}: {figures_of(result)}", loc="left", fontsize=10)
        _draw(axes, result)
    grid[-1, 0].set_xlim(0, max(result.makespan for result in results.values()) or 1.0)
    grid[-1, 0].set_xlabel("time; 1 is the unit of --times, the forward of a rank's whole share by default")
    kinds = sorted({bar.action.kind for result in results.values() for bar in _bars(result)}, key="FBIW".index)
    handles = [Patch(facecolor=COLORS[one][0][0], label=KIND_NAMES[one]) for one in kinds]
    if any(bar.fill == COLORS[bar.action.kind][1][0] for result in results.values() for bar in _bars(result)):
        handles.append(Patch(facecolor=COLORS["F"][1][0], label="lighter: the rank's 2nd, 4th, ... stage"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "hf_parallel"}
    ):  # text as text, and the same file each time
        figure.savefig(path, dpi=120, format=kind, metadata={"Date": None} if kind == "svg" else None)


def figures_of(result: Simulation) -> str:
    """The figures of a timed schedule for its title: step, bubble, and the most activations that a rank holds."""
    peak = max(peak_activations(result.schedule))
    return f"step {result.makespan:g}, bubble {result.bubble_fraction:.1%}, activations of {peak:.3g} microbatches at most"


def _draw(axes: Any, result: Simulation) -> None:
    for bar in _bars(result):
        length = bar.end - bar.start
        axes.broken_barh([(bar.start, length)], (bar.rank - 0.45, 0.9), facecolors=bar.fill, edgecolor="white")
        middle = bar.start + length / 2
        axes.text(middle, bar.rank, bar.action.microbatch, ha="center", va="center", color=bar.ink, fontsize=7)
    ranks = range(len(result.schedule))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()


def write_trace(path: str | Path, results: Mapping[str, Simulation]) -> None:
    """Write the schedules as a Chrome trace, for Perfetto or chrome://tracing; one time unit is one millisecond.

    A process is a rank and a thread a stage; a second schedule's processes count on from the first's.

    Args:
        path: The file to write.
        results: Title to timed schedule.

    Raises:
        OSError: If the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    first = 0
    for title, result in results.items():
        for rank in range(len(result.schedule)):
            name = {"name": f"{title} rank {rank}"}
            events.append({"ph": "M", "name": "process_name", "pid": first + rank, "tid": 0, "args": name})
        for bar in _bars(result):
            event = {"ph": "X", "name": str(bar.action), "cat": bar.action.kind, "tid": bar.action.stage}
            event |= {"pid": first + bar.rank, "ts": bar.start * MICROSECONDS_A_UNIT}
            event |= {"dur": (bar.end - bar.start) * MICROSECONDS_A_UNIT}
            events.append(event | {"args": {"microbatch": bar.action.microbatch}})
        first += len(result.schedule)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _bars(result: Simulation) -> Iterator[_Bar]:
    """Yield every action in the order of its rank, with place and colours."""
    for rank, (actions, starts, ends) in enumerate(zip(result.schedule, result.starts, result.ends, strict=True)):
        stages = sorted({action.stage for action in actions})
        for action, start, end in zip(actions, starts, ends, strict=True):
            fill, ink = COLORS[action.kind][stages.index(action.stage) % 2]
            yield _Bar(rank, action, start, end, fill, ink)
