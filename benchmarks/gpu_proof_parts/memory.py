"""Peak memory of training steps against what `hf_parallel.memory` counts for them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from rank_runner import RankError

from gpu_proof_parts.ranks import Setting, launch
from gpu_proof_parts.training import SMALL, TINY, Run, Size, train
from hf_parallel import HFParallelConfig
from hf_parallel.memory.estimate import OVERHEAD, estimate
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import ModelShape, Precision, Work, layout_of


MOST = 0.15  # share of the estimate by which a peak may be above it
RUNS: dict[str, tuple[int, Run]] = {
    "autocast": (1, Run({}, steps=2)),
    "autocast, blocks recomputed": (1, Run({"activation_checkpointing": {"every": 1}}, steps=2)),
    "bf16": (1, Run({}, steps=2, half=True)),
    "pp2": (2, Run({"pp_size": 2, "num_microbatches": 4}, steps=2)),
    "tp2": (2, Run({"tp_size": 2}, steps=2)),
    "zero1": (2, Run({"zero": {"stage": 1}}, steps=2)),
}


def peak(rank: int, world_size: int, setting: Setting, size: Size, run: Run) -> int:
    """Bytes of tensors on this rank at most."""
    assert run.parallel is not None
    replicas = world_size // (run.parallel.get("pp_size", 1) * run.parallel.get("tp_size", 1))
    return train(setting, size, run, replicas).peak_bytes


def counted(size: Size, run: Run, world_size: int) -> float:
    """Bytes that the estimate has for the rank that needs most, without a context and fragmentation."""
    assert run.parallel is not None
    pipeline = {name: value for name, value in run.parallel.items() if name == "num_microbatches"}
    rest = {name: value for name, value in run.parallel.items() if name not in pipeline}
    config = HFParallelConfig(**rest, **({"pipeline": pipeline} if pipeline else {}))
    precision: Precision = "half" if run.half else "autocast"
    layout, shape = layout_of(config, world_size, world_size, precision), _shape(size, precision)
    memory = estimate(shape, layout, Work(size.rows, size.length))
    return sum(value for name, value in memory.gpu.items() if name != OVERHEAD)


@functools.cache
def _shape(size: Size, precision: Precision) -> ModelShape:
    return shape_of_config(size.config(), precision)


def run(setting: Setting) -> dict[str, Any]:
    """Peaks of the rank that needs most; one that is far above its estimate fails the step."""
    size, found = (TINY if setting.is_tiny else SMALL), dict[str, Any]()
    for name, (world_size, one) in RUNS.items():
        backend = setting.backend(world_size) if world_size > 1 else None
        try:
            peaks = launch(setting, peak, world_size, setting, size, one, backend=backend, timeout=75.0)
        except RankError as error:
            found[name] = {"error": str(error)[-3000:]}
            continue
        estimated = counted(size, one, world_size)
        found[name] = {"peak_bytes": max(peaks), "estimated_bytes": estimated, "ratio": max(peaks) / estimated}
        setting.keep({"model": dataclasses.asdict(size), "runs": found})
    limit = float("inf") if setting.is_tiny else 1 + MOST
    wrong = [name for name, row in found.items() if "error" in row or row["ratio"] > limit]
    reasons = [f"{name}: {found[name].get('error') or _far(found[name])}" for name in wrong]
    shown = {"model": dataclasses.asdict(size), "runs": found}
    return {**shown, **({"failed": "\n".join(reasons)} if wrong else {})}


def _far(row: dict[str, Any]) -> str:
    peak, counts = row["peak_bytes"] / 1e9, row["estimated_bytes"] / 1e9
    return f"{peak:.2f} GB, {row['ratio']:.2f} of the {counts:.2f} GB estimated (at most {1 + MOST:.2f} passes)"
