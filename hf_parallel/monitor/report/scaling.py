"""Compares what a run reached with the planner's prediction for 1 and more ranks of its kind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_parallel.engine.run.engine import Engine
from hf_parallel.machine.facts import this_machine
from hf_parallel.mesh.ranks import ranks_per_node
from hf_parallel.monitor.report.metrics import Job
from hf_parallel.monitor.report.picture import LEFT, WIDTH, drawing, legend
from hf_parallel.planner.here import cluster_here
from hf_parallel.planner.scaling import scaling


logger = logging.getLogger(__name__)

HEIGHT = 180.0


@dataclass(frozen=True)
class Scaled:
    """The best plan of some ranks, each with as many rows as in the run.

    Attributes:
        ranks: Number of ranks.
        layout: In words.
        tokens_per_s: Predicted.
        speed_up: Against one rank of the smallest number that fits.
        memory_bytes: Predicted, of the fullest rank.
    """

    ranks: int
    layout: str
    tokens_per_s: float
    speed_up: float
    memory_bytes: float


def planned_scaling(engine: Engine, job: Job, seq_len: int) -> list[Scaled]:
    """Plan for 1 rank up to the ranks of the run; empty if the planner does not know the model or the device.

    Args:
        engine: Engine of rank 0.
        job: Facts that the ranks told.
        seq_len: Tokens of a row.
    """
    read = sum(job.told[job.shape.rank_at(replica, 0, 0)].tokens for replica in range(job.shape.dp_size))
    rows, device = round(read / max(1, seq_len)), engine.attachment.device
    with engine.autocast():
        casts = torch.is_autocast_enabled(device.type)
        computed = torch.get_autocast_dtype(device.type) if casts else next(iter(engine.model.parameters())).dtype
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(computed, "fp32")
    try:
        cluster = cluster_here(this_machine(), job.shape.world_size, ranks_per_node(), on_gpu=device.type == "cuda")
        found = scaling(engine.model.config, cluster, seq_len=seq_len, global_batch=rows, layout={"dtype": dtype})
    except Exception as error:  # noqa: BLE001 - a config may be of any kind; the rest of the page does not need it
        logger.info("hf_parallel: scaling of this model cannot be planned (%s), so the report has none.", error)
        return []
    return [
        Scaled(
            one.plan.cluster.num_gpus,
            f"tp {one.plan.spec.tp} x pp {one.plan.spec.pp} x dp {one.plan.spec.dp}"
            + (f", zero {one.plan.spec.zero}" if one.plan.spec.zero else ""),
            one.plan.estimate.tokens_per_s,
            one.speed_up,
            one.plan.estimate.total_bytes,
        )
        for one in found
    ]


def scaling_picture(planned: Sequence[Scaled], ranks: int, measured: float) -> str:
    """Tokens per second over ranks: ideal and planned as lines, the run as a dot.

    Args:
        planned: By ranks, ascending; not empty.
        ranks: Ranks of the run.
        measured: Tokens per second of the run.
    """
    first, most_ranks = planned[0], max(planned[-1].ranks, ranks)
    ideal = first.tokens_per_s / first.ranks
    top = max(ideal * most_ranks, measured, *(one.tokens_per_s for one in planned)) or 1.0

    def place(count: float, tokens: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - 40) * count / most_ranks, HEIGHT - 30 - (HEIGHT - 50) * tokens / top

    def line(points: list[tuple[float, float]], kind: str) -> str:
        return f"<polyline class='{kind}' points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in points)}'/>"

    parts = [
        line([place(0, 0), place(most_ranks, ideal * most_ranks)], "ideal"),
        line([place(one.ranks, one.tokens_per_s) for one in planned], "curve"),
    ]
    for one in planned:
        x, y = place(one.ranks, one.tokens_per_s)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='#2b5fb3'/>")
        parts.append(f"<text x='{x:.1f}' y='{HEIGHT - 12:.0f}' text-anchor='middle'>{one.ranks}</text>")
    x, y = place(ranks, measured)
    parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='#a8434f'><title>measured</title></circle>")
    parts.append(f"<text x='{LEFT - 8}' y='24' text-anchor='end'>{top:,.4g} tokens/s</text>")
    parts.append(f"<text x='{LEFT - 8}' y='{HEIGHT - 26:.0f}' text-anchor='end'>0</text>")
    axis = f"<line class='grid' x1='{LEFT}' x2='{WIDTH}' y1='{HEIGHT - 30}' y2='{HEIGHT - 30}'/>"
    keys = {"planned": "#2b5fb3", "as many times as fast as ranks": "#9aa4b5", "this run": "#a8434f"}
    return drawing(HEIGHT, axis + "".join(parts)) + legend(keys)
