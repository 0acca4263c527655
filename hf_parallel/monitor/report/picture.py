"""Pictures for the page, as SVG text."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


COLORS: Final = {
    "F": ("#2b5fb3", "forward"),
    "B": ("#2e7d4f", "backward"),
    "I": ("#167a7f", "gradients of inputs"),
    "W": ("#b35412", "gradients of weights"),
    "receive F": ("#c9ced8", "wait for a stage"),
    "receive B": ("#c9ced8", "wait for a stage"),
    "loss": ("#e3e6ec", "wait for the loss"),
    "wait reduce": ("#8e5bb5", "sums over ranks"),
    "gather": ("#8e5bb5", "sums over ranks"),
    "shared": ("#8e5bb5", "sums over ranks"),
    "norm": ("#d9b84a", "gradient norm"),
    "optimizer": ("#a8434f", "update"),
    "data": ("#6b4f3a", "wait for data"),
}
WIDTH: Final = 1080.0
LEFT: Final = 230.0
ROW: Final = 17.0
LEGIBLE: Final = 6.0  # of a letter
MOST_ARROWS: Final = 400  # more would hide what they point to


@dataclass(frozen=True)
class Bar:
    """A bar of a timeline; seconds."""

    rank: int
    kind: str
    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Arrow:
    """A message; seconds.

    Attributes:
        label: Name of the message.
        kind: "F" or "B", the action that made it.
        source: Rank that sent it.
        sent: Time of sending.
        target: Rank that it went to.
        taken: Time at which the receiver had it.
    """

    label: str
    kind: str
    source: int
    sent: float
    target: int
    taken: float


def timeline(names: Sequence[str], planned: Sequence[Bar], measured: Sequence[Bar], arrows: Sequence[Arrow]) -> str:
    """Two rows a rank, planned above measured, on one axis of time, and the messages that were measured.

    Args:
        names: Names of the ranks.
        planned: May be empty: then there is one row a rank.
        measured: Measured spans.
        arrows: Messages between these ranks.
    """
    end = max((bar.end for bar in (*planned, *measured)), default=0.0)
    if not end:
        return "<p>No step was recorded.</p>"
    kinds = [rows for rows in (("planned", planned), ("measured", measured)) if rows[1]]
    block, scale = ROW * len(kinds) + 10, (WIDTH - LEFT - 10) / end
    height, parts = block * len(names) + 24, []
    unit, per_s = ("s", 1.0) if end >= 2 else ("ms", 1e3)
    for tick in _ticks(end):
        x = LEFT + scale * tick
        parts.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{height - 18:.0f}'/>")
        parts.append(f"<text x='{x:.1f}' y='{height - 5:.0f}' text-anchor='middle'>{per_s * tick:g} {unit}</text>")
    for rank, name in enumerate(names):
        for place, (word, bars) in enumerate(kinds):
            y = block * rank + ROW * place
            label = f"{name}: {word}" if place == 0 else word
            parts.append(f"<text x='{LEFT - 8}' y='{y + 12:.0f}' text-anchor='end'>{html.escape(label)}</text>")
            parts += [_drawn(bar, y, scale) for bar in bars if bar.rank == rank]
    last = ROW * (len(kinds) - 1)  # measured
    for arrow in arrows if len(arrows) <= MOST_ARROWS else ():
        parts.append(_pointed(arrow, block * arrow.source + last, block * arrow.target + last, scale))
    used = {bar.kind for bar in (*planned, *measured)}
    keys = {text: color for kind, (color, text) in COLORS.items() if kind in used}
    return drawing(height, HEADS + "".join(parts)) + legend(keys)


def drawing(height: float, inside: str) -> str:
    """A picture of the page's width, which scrolls where a screen is too narrow for its labels."""
    return f"<div class='wide'><svg viewBox='0 0 {WIDTH:.0f} {height:.0f}' role='img'>{inside}</svg></div>"


def legend(keys: Mapping[str, str]) -> str:
    """Explain the colors; a color and its word stay in one line."""
    entries = (
        f"<span class='entry'><span class='key' style='background:{color}'></span>{text}</span>"
        for text, color in keys.items()
    )
    return f"<p>{' '.join(entries)}</p>"


HEADS: Final = (
    "<defs><marker id='head' viewBox='0 0 6 6' refX='5' refY='3' markerWidth='5' markerHeight='5' orient='auto'>"
    "<path d='M0,0 L6,3 L0,6 z' fill='context-stroke'/></marker></defs>"
)


def _pointed(arrow: Arrow, source_y: float, target_y: float, scale: float) -> str:
    """Draw an arrow from the edge of the sender's row to that of the receiver's."""
    down = target_y > source_y
    begin, end = (source_y + ROW - 2, target_y) if down else (source_y, target_y + ROW - 2)
    what = html.escape(f"{arrow.label}: {1e3 * (arrow.taken - arrow.sent):.4g} ms until it was taken", quote=True)
    place = (
        f"x1='{LEFT + scale * arrow.sent:.2f}' y1='{begin:.0f}' x2='{LEFT + scale * arrow.taken:.2f}' y2='{end:.0f}'"
    )
    return f"<line class='message' {place} stroke='{COLORS[arrow.kind][0]}' marker-end='url(#head)'><title>{what}</title></line>"


def _drawn(bar: Bar, y: float, scale: float) -> str:
    x, width, color = LEFT + scale * bar.start, scale * (bar.end - bar.start), COLORS[bar.kind][0]
    what = html.escape(f"{bar.label or bar.kind}: {1e3 * (bar.end - bar.start):.4g} ms", quote=True)
    shape = f"<rect x='{x:.2f}' y='{y:.0f}' width='{max(width - 0.5, 0.3):.2f}' height='{ROW - 2:.0f}' fill='{color}'><title>{what}</title></rect>"
    if bar.label and width > LEGIBLE * len(bar.label) + 2:
        shape += f"<text class='in' x='{x + width / 2:.1f}' y='{y + 11:.0f}' text-anchor='middle'>{html.escape(bar.label)}</text>"
    return shape


def _ticks(end: float) -> list[float]:
    """Round moments, five to ten of them."""
    step = 10 ** math.floor(math.log10(end))
    step = next(step * part for part in (1.0, 0.5, 0.2, 0.1) if end / (step * part) >= 5)
    return [step * n for n in range(int(end / step) + 1)]


def curve(title: str, points: Sequence[tuple[float, float]]) -> str:
    """A line over the steps; nothing for fewer than two points."""
    if len(points) < 2:
        return ""
    first, last, most = points[0][0], points[-1][0], max(value for _, value in points) or 1.0
    line = " ".join(
        f"{LEFT + (WIDTH - LEFT - 10) * (step - first) / (last - first or 1.0):.1f},{110 - 100 * value / most:.1f}"
        for step, value in points
    )
    marks = f"<text x='{LEFT - 8}' y='14' text-anchor='end'>{most:,.4g}</text><text x='{LEFT - 8}' y='113' text-anchor='end'>0</text>"
    ends = f"<text x='{LEFT}' y='126'>step {first:.0f}</text><text x='{WIDTH - 10}' y='126' text-anchor='end'>step {last:.0f}</text>"
    axis = f"<line class='grid' x1='{LEFT}' x2='{WIDTH}' y1='110' y2='110'/>"
    return f"<h2>{html.escape(title)}</h2>" + drawing(
        130, f"{axis}{marks}{ends}<polyline class='curve' points='{line}'/>"
    )


def beside(rows: Sequence[tuple[str, float, float]], unit: str) -> str:
    """Two bars for each row, planned above measured, on one axis.

    Args:
        rows: Name, planned and measured.
        unit: Unit of the numbers.
    """
    most = max((value for _, *both in rows for value in both), default=0.0) or 1.0
    block, parts = 2 * ROW + 10, []
    for place, (name, *both) in enumerate(rows):
        for line, (word, value, color) in enumerate(
            zip(("planned", "measured"), both, ("#9aa4b5", "#2b5fb3"), strict=True)
        ):
            y, width = block * place + ROW * line, (WIDTH - LEFT - 110) * value / most
            label = f"{name}: {word}" if line == 0 else word
            parts.append(f"<text x='{LEFT - 8}' y='{y + 12:.0f}' text-anchor='end'>{html.escape(label)}</text>")
            parts.append(
                f"<rect x='{LEFT}' y='{y:.0f}' width='{max(width, 0.5):.1f}' height='{ROW - 2:.0f}' fill='{color}'/>"
            )
            parts.append(f"<text x='{LEFT + width + 6:.1f}' y='{y + 12:.0f}'>{value:.3g} {unit}</text>")
    return drawing(block * len(rows), "".join(parts))
