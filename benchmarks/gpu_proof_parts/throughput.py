"""Tokens a second and the share of the GPU's peak that a model of 1e9 to 7e9 parameters reaches: bf16, fused attention, AdamW."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

from rank_runner import RankError

from gpu_proof_parts.memory import counted
from gpu_proof_parts.ranks import Setting, launch
from gpu_proof_parts.training import TINY, Run, Size, train


# Dense bf16 products with fp32 sums, FLOP/s, of data sheets; the first name that the GPU's contains counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10": 125e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
SIZES = (
    Size("6.7B", 4096, 32, 32, 32, 11008, 32000, 1, 4096),
    Size("2.9B", 3072, 28, 24, 8, 8192, 32000, 1, 4096),
    Size("1.1B", 2048, 22, 32, 4, 5632, 32000, 1, 2048),
)
ROWS = (8, 4, 2, 1)
FILLED = 0.9  # of the free memory
STEPS, PARTS = 16, 4
TRIES = 3


def peak_flops(name: str) -> float | None:
    """Of a GPU, by its name."""
    return next((flops for known, flops in PEAKS.items() if known in name), None)


def candidates(free_bytes: float) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Sizes and settings that fit, the largest model first; blocks are recomputed where nothing else fits."""
    for size in SIZES:
        for recompute in ({}, {"activation_checkpointing": {"every": 1}}):
            for rows in ROWS:
                wanted = dataclasses.replace(size, rows=rows)
                if counted(wanted, Run(recompute, half=True), 1) <= FILLED * free_bytes:
                    yield wanted, dict(recompute)
                    break


def flops_of_token(size: Size, parameters: int) -> float:
    """Of forward and backward, without recomputation.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B; the embedding is looked up, not multiplied.
    """
    return 6.0 * (parameters - size.vocab * size.hidden) + 12.0 * size.blocks * size.hidden * size.length


def ran(rank: int, world_size: int, setting: Setting, size: Size, run: Run) -> dict[str, Any]:
    """One rank's run."""
    replicas = world_size // ((run.parallel or {}).get("pp_size", 1))
    return dataclasses.asdict(train(setting, size, run, replicas))


def measured(setting: Setting, size: Size, run: Run, world_size: int) -> dict[str, Any]:
    """Figures of one variant, or why it could not run."""
    backend = setting.backend(world_size) if world_size > 1 else None
    try:
        found = launch(setting, ran, world_size, setting, size, run, backend=backend, timeout=200.0)[0]
    except RankError as error:
        last = str(error).strip().splitlines()[-1]
        return {"refused" if "ConfigError" in str(error) else "error": last, "text": str(error)[-2000:]}
    replicas = world_size // ((run.parallel or {}).get("pp_size", 1))
    tokens = size.rows * size.length * replicas
    part = max(1, len(found["seconds"]) // PARTS)
    medians = [statistics.median(found["seconds"][i : i + part]) for i in range(0, len(found["seconds"]), part)]
    speeds = [tokens / seconds for seconds in medians]
    flops = [speed * flops_of_token(size, found["parameters"]) / world_size for speed in speeds]
    peak = peak_flops(setting.machine.gpus[0]) if setting.machine.gpus else None
    middle = statistics.median
    return {
        "parameters": found["parameters"],
        "rows": size.rows,
        "length": size.length,
        "step_s": middle(medians),
        "tokens_s": {"median": middle(speeds), "least": min(speeds), "most": max(speeds)},
        "tflops_a_gpu": middle(flops) / 1e12,
        "mfu": middle(flops) / peak if peak else None,
        "peak_tflops": peak / 1e12 if peak else None,
        "peak_bytes": found["peak_bytes"],
        "losses": found["losses"],
        "world_size": world_size,
    }


def variants(setting: Setting, parallel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by name; compiled blocks where they are allowed together with the rest."""
    backend = setting.compile_backend
    made = {"blocks as they are": parallel}
    if backend is not None:
        made["blocks compiled"] = {**parallel, "compile_blocks": backend}
        if setting.num_gpus > 1 and "activation_checkpointing" not in parallel:
            made["pp2, blocks compiled"] = {"pp_size": 2, "num_microbatches": 4, "compile_blocks": backend}
    return made


def run(setting: Setting) -> dict[str, Any]:
    """The largest model that fits, on every GPU; several share the optimizer's state."""
    world_size = max(1, setting.num_gpus) if setting.device == "cuda" else 1
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") and not setting.is_tiny else "sdpa"
    free = setting.machine.free_bytes
    tried: list[tuple[Size, dict[str, Any]]] = [(TINY, {})] if setting.is_tiny else list(candidates(free))[:TRIES]
    found: dict[str, Any] = {"attention": attention, "not fitting": []}
    if not tried:
        return found | {"failed": f"no model of {SIZES[-1].name} parameters or more fits into {free / 1e9:.1f} GB"}
    for size, recompute in tried:
        parallel = {**recompute, **({"zero": {"stage": 1}} if world_size > 1 else {})}
        rows: dict[str, Any] = {}
        for name, settings in variants(setting, parallel).items():
            steps = 2 if setting.is_tiny else STEPS
            rows[name] = measured(setting, size, Run(settings, steps, 3, True, attention), world_size)
            setting.keep({**found, "model": size.name, "recomputed": bool(recompute), "variants": rows})
        if "out of memory" in rows["blocks as they are"].get("text", ""):
            found["not fitting"].append([size.name, size.rows, recompute])
            continue
        wrong = [f"{name}: {row['error']}" for name, row in rows.items() if "error" in row]
        shown = {**found, "model": size.name, "recomputed": bool(recompute), "variants": rows}
        return {**shown, **({"failed": "\n".join(wrong)} if wrong else {})}
    return found | {"failed": f"out of memory at each of {[size.name for size, _ in tried]}"}
