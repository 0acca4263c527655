"""The speed-up over ever more GPUs as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hf_parallel.errors import ConfigError
from hf_parallel.planner.scaling import Scaled


def refuse_plot(path: Path) -> None:
    """Check, before anything is counted, that the picture can be drawn.

    Args:
        path: Path of the picture.

    Raises:
        ConfigError: Its ending is another, or matplotlib is not installed.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"plot={path}: expected a file that ends in .svg or .png. Rename it.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"plot={path}: a picture needs matplotlib, which is not installed. Run pip install 'hf_parallel[viz]', or leave "
            "out --plot."
        )


def draw_scaling(rows: Sequence[Scaled], path: Path) -> None:
    """Write speed-up over GPUs, with the line of equal speed for each GPU.

    Args:
        rows: From `scaling`.
        path: File; its ending says the format: .svg or .png.

    """
    from matplotlib.figure import Figure

    counts = [row.plan.cluster.num_gpus for row in rows]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        counts,
        [count / counts[0] * rows[0].speed_up for count in counts],
        "--",
        color="grey",
        label="each GPU as fast",
    )
    axes.plot(counts, [row.speed_up for row in rows], "o-", label="planned")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yticks(counts, [f"{count} x" for count in counts])
    for row in rows:
        text = "" if row.ratio is None else f"{row.ratio:.1f} : 1"
        place = (row.plan.cluster.num_gpus, row.speed_up)
        axes.annotate(text, place, textcoords="offset points", xytext=(6, -12), fontsize="small")
    axes.set_xlabel("GPUs; beside the points: computation : messages")
    axes.set_ylabel("tokens a second")
    axes.legend()
    figure.savefig(path)
