"""Pictures for the page, as SVG text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Bar:
    """Something in a timeline; seconds."""

    rank: int
    kind: str
    label: str
    start: float
    end: float


def timeline(names: Sequence[str], planned: Sequence[Bar], measured: Sequence[Bar]) -> str:
    """Two rows a rank, planned above measured, on one axis of time.

    Args:
        names: Of the ranks.
        planned: May be empty: then there is one row a rank.
        measured: What was measured.
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
    used = {bar.kind for bar in (*planned, *measured)}
    keys = {text: color for kind, (color, text) in COLORS.items() if kind in used}
    legend = "".join(f"<span class='key' style='background:{color}'></span>{text}" for text, color in keys.items())
    return f"<svg viewBox='0 0 {WIDTH:.0f} {height:.0f}' role='img'>{''.join(parts)}</svg><p>{legend}</p>"


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
    return f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 {WIDTH:.0f} 130'>{axis}{marks}{ends}<polyline class='curve' points='{line}'/></svg>"
