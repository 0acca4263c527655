"""The arithmetic of memory in words: every term, what cannot fit and what may not. GB are 1e9 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hf_parallel.memory.estimate import OVERHEAD, states
from hf_parallel.memory.terms import Layout, Memory


GB: Final = 1e9


def describe(memory: Memory) -> list[str]:
    """Every term in a line, with the sums."""
    lines = [f"GPU of rank {memory.rank}, which needs most:", *_rows(memory.gpu)]
    if memory.host:
        rounding = memory.host_pinned / GB
        lines += ["RAM of a node, for what is offloaded:", *_rows(memory.host)]
        lines.append(f"  pinned blocks are rounded up to a power of two: up to {rounding:.1f} GB more")
    lines.append(f"RAM of a node while each rank loads the whole model: {memory.loading / GB:.1f} GB")
    return lines


def _rows(terms: Mapping[str, float]) -> list[str]:
    rows = [*terms.items(), ("sum", sum(terms.values()))]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}} {size / GB:8.2f} GB" for name, size in rows]


def shortages(memory: Memory, gpu_bytes: float | None, host_bytes: float | None) -> list[str]:
    """Problems where something cannot fit, with every term: the sizes, the rule, a fix. `OVERHEAD` and pinned rounding are left out.

    Args:
        memory: Memory that is needed.
        gpu_bytes: Memory of a GPU, None if it is not known.
        host_bytes: RAM of a node, None if it is not known.
    """
    found = []
    certain = {name: size for name, size in memory.gpu.items() if name != OVERHEAD}
    if gpu_bytes is not None and sum(certain.values()) > gpu_bytes:
        found.append(
            f"GPU memory: {_sum(certain)} needed, {gpu_bytes / GB:.1f} GB there. "
            f"{_advice(certain)} Or use more or larger GPUs."
        )
    if host_bytes is not None and memory.host_bytes > host_bytes:
        found.append(
            f"RAM: {_sum(memory.host)} needed for what is offloaded, {host_bytes / GB:.1f} GB there; the operating system "
            "would end the run. Offload less, use more nodes, or add RAM."
        )
    return found


def tight(memory: Memory, gpu_bytes: float | None, host_bytes: float | None) -> list[str]:
    """Warn of what may not fit: overhead on the GPU, pinned rounding and loading in RAM."""
    found = []
    certain = memory.gpu_bytes - memory.gpu.get(OVERHEAD, 0.0)
    if gpu_bytes is not None and certain <= gpu_bytes < memory.gpu_bytes:
        found.append(
            f"GPU memory: {certain / GB:.1f} GB counted and {memory.gpu[OVERHEAD] / GB:.1f} GB of overhead (context, "
            f"fragmentation) on {gpu_bytes / GB:.1f} GB. Lower the rows or the length, or checkpoint more."
        )
    most = memory.host_bytes + memory.host_pinned
    if host_bytes is not None and memory.host_bytes <= host_bytes < most:
        found.append(
            f"RAM: {memory.host_bytes / GB:.1f} GB for what is offloaded can become {most / GB:.1f} GB, because pinned blocks "
            f"are rounded up to a power of two, and {host_bytes / GB:.1f} GB are there. Add RAM, or with DeepSpeed set "
            "DS_PIN_MEMORY_BACKEND=native, or pin_memory to false."
        )
    if host_bytes is not None and memory.loading > host_bytes:
        found.append(
            f"RAM: {memory.loading / GB:.1f} GB while every rank of a node loads the whole model, {host_bytes / GB:.1f} GB "
            "there. Read it in parts (hf_parallel.from_pretrained), load it in 16 bit if it is in fp32, or start fewer ranks on a node."
        )
    return found


def _sum(terms: Mapping[str, float]) -> str:
    parts = " + ".join(f"{name} {size / GB:.1f}" for name, size in terms.items())
    return f"{parts} = {sum(terms.values()) / GB:.1f} GB"


def _advice(terms: Mapping[str, float]) -> str:
    """Advice that lowers the largest term."""
    advice = {
        "weights": "Raise tp_size or pp_size, or set zero.stage to 3.",
        "gradients": "Set zero.stage to 2 or more, or raise pp_size.",
        "optimizer state": "Set zero.stage to 1 or more, or raise the number of replicas.",
        "activations": "Set activation_checkpointing.every to 1, or lower the rows.",
        "recomputed blocks": "Lower activation_checkpointing.every, or the rows.",
        "temporaries": "Lower the rows or the length.",
        "logits and loss": "Lower the rows or the length, or raise tp_size.",
    }
    largest = max(terms, key=lambda name: terms[name])
    return advice.get(largest, f"The largest term is: {largest}.")


def zero_table(parameters: float, shards: int) -> list[str]:
    """The states of mixed-precision Adam by ZeRO stage as a Markdown table, GB a GPU."""
    rows = ["| stage | weights | gradients | optimizer | sum |", "|---|---|---|---|---|"]
    for stage in range(4):
        sizes = states(parameters, Layout(shards, shards, stage=stage, engine="deepspeed"))
        cells = [f"{size / GB:.4g}" for size in (*sizes.values(), sum(sizes.values()))]
        rows.append(f"| {stage} | {' | '.join(cells)} |")
    return rows
