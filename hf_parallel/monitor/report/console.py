"""One compact line of the metrics for the console, in place of the keys that trackers get."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Mapping
from typing import IO, Final, NamedTuple


PREFIX: Final = "monitor/"
ABOVE_PLAN: Final = 0.1  # a bubble that is so much above its plan is marked


class Part(NamedTuple):
    """A piece of the line.

    Attributes:
        value: With its unit.
        beside: Figure that it is compared with; empty without one.
        is_marked: Whether somebody should look at it.
    """

    value: str
    beside: str = ""
    is_marked: bool = False

    @property
    def text(self) -> str:
        """The figure as plain text."""
        return f"{self.value} ({self.beside})" if self.beside else self.value


def parts_of(metrics: Mapping[str, float], step: int, max_steps: int) -> list[Part]:
    """The line in pieces.

    Args:
        metrics: Metrics from `metrics_of`, or logs with these.
        step: Number of the step that has just ended.
        max_steps: Steps of the run.
    """
    own = {key.removeprefix(PREFIX): value for key, value in metrics.items() if key.startswith(PREFIX)}
    seconds = own["step_s"]
    found = [Part(f"step {step}/{max_steps}"), Part(f"{own['tokens_per_s']:,.0f} tokens/s"), Part(f"{seconds:.3g} s a step")]  # fmt: skip
    if "mfu" in own:
        found.append(Part(f"MFU {own['mfu']:.1%}"))
    if "bubble" in own:
        planned = own.get("bubble_planned")
        is_marked = planned is not None and own["bubble"] > planned + ABOVE_PLAN
        found.append(
            Part(f"bubble {own['bubble']:.0%}", "" if planned is None else f"planned {planned:.0%}", is_marked)
        )
    waits = {key.removeprefix("exposed_s/"): value for key, value in own.items() if key.startswith("exposed_s/")}
    waits["data"] = own["data_wait_s"]
    worst = max(waits, key=lambda cause: waits[cause])
    if seconds and waits[worst] >= 0.01 * seconds:
        found.append(Part(f"waits {sum(waits.values()) / seconds:.0%}", f"most for {worst}"))
    expected = own["memory_expected_gb"]
    found.append(Part(f"{own['memory_gb']:.3g} GB", f"expected {expected:.3g}" if expected else ""))
    return [*found, Part(f"{duration(seconds * max(0, max_steps - step))} left")]


def duration(seconds: float) -> str:
    """Seconds as somebody would say them: 45 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def line_of(metrics: Mapping[str, float], step: int, max_steps: int, stream: IO[str] | None = None) -> str:
    """The line, in colours where a terminal shows it.

    Args:
        metrics: Metrics from `metrics_of`, or logs with these.
        step: Number of the step that has just ended.
        max_steps: Steps of the run.
        stream: Stream that it is written to; None: stdout.
    """
    parts, stream = parts_of(metrics, step, max_steps), stream or sys.stdout
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        return "  ".join(part.text for part in parts)
    from rich.console import Console  # only for a terminal: training jobs on clusters have none
    from rich.text import Text

    line = Text("  ").join(
        Text.assemble(
            (part.value, "bold yellow" if part.is_marked else "bold"),
            (f" ({part.beside})" if part.beside else "", "dim"),
        )
        for part in parts
    )
    drawn = io.StringIO()
    Console(file=drawn, force_terminal=True, width=1000, highlight=False).print(line, end="")
    return drawn.getvalue()
