"""A stock Trainer with HFParallelCallback against one without: step times, paired, in one process."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from timing import shuffled

from gpu_proof_parts.ranks import Setting, launch
from gpu_proof_parts.training import SMALL, TINY, Run, train


VARIANTS: dict[str, dict[str, Any] | None] = {"stock": None, "callback": {}}
ROUNDS = 5
SAME_LOSS = 1e-3  # relative, of bf16


def rounds(rank: int, world_size: int, setting: Setting, count: int) -> list[dict[str, dict[str, Any]]]:
    """What each variant found in each round; the first round, in which kernels are chosen, is left out."""
    size, found = TINY if setting.is_tiny else SMALL, []
    for number in range(-1, count):
        names = shuffled(list(VARIANTS), number + 1)
        ran = {name: dataclasses.asdict(train(setting, size, Run(VARIANTS[name]))) for name in names}
        if number >= 0:
            found.append(ran)
    return found


def run(setting: Setting) -> dict[str, Any]:
    """Ratio of the median step times, over the rounds."""
    ran = launch(setting, rounds, 1, setting, 1 if setting.is_tiny else ROUNDS, timeout=420.0)[0]
    median = [{name: statistics.median(one["seconds"]) for name, one in pair.items()} for pair in ran]
    ratios = [pair["callback"] / pair["stock"] for pair in median]
    losses = {name: ran[0][name]["losses"][-1] for name in VARIANTS}
    found: dict[str, Any] = {
        "model": (TINY if setting.is_tiny else SMALL).name,
        "step_ms": {name: 1e3 * statistics.median(pair[name] for pair in median) for name in VARIANTS},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peak_bytes": {name: ran[0][name]["peak_bytes"] for name in VARIANTS},
        "losses": losses,
    }
    if abs(losses["callback"] - losses["stock"]) > SAME_LOSS * abs(losses["stock"]):
        found["failed"] = f"the losses differ: {losses}"
    return found
