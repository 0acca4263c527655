"""The machines that a run is on, as a cluster of the hardware table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import Machine, nvml_links
from hf_parallel.planner.hardware import Cluster, gpu_table


# What drivers call a GPU -> its key, the more specific first.
NAMES: Final = (
    (r"A100.*80|A100X", "a100_80"),
    (r"A100", "a100_40"),
    (r"H100.*PCIe", "h100_pcie"),
    (r"GH200|H100.*(94|96)", "h100_96"),
    (r"H100", "h100"),
    (r"H200", "h200"),
    (r"B200", "b200"),
    (r"V100", "v100"),
    (r"L40S", "l40s"),
    (r"RTX A6000", "a6000"),
    (r"\bA10G\b", "a10g"),
    (r"\bA10\b", "a10"),
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"RTX 3090", "rtx3090"),
    (r"RTX 4090", "rtx4090"),
)


def key_of(name: str) -> str:
    """The key of the hardware table that a driver's name of a GPU stands for.

    Raises:
        ConfigError: None; names the nearest ones.
    """
    found = next((key for pattern, key in NAMES if re.search(pattern, name)), None)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), gpu_table(), 3, 0.0)
    raise ConfigError(
        f"layout=auto: GPU {name!r} is not in the hardware table. Give tp_size, pp_size and zero yourself, or plan with `hf-parallel "
        f"plan --gpu` and the nearest of {', '.join(near)}, then train with what --write wrote."
    )


def cluster_here(machine: Machine, world_size: int, ranks_per_node: int, *, on_gpu: bool) -> Cluster:
    """The cluster that a run is on, if all its machines are as this one.

    Args:
        machine: This machine.
        world_size: Ranks of the run.
        ranks_per_node: Ranks on this machine.
        on_gpu: Whether each has a GPU; else they share cores and RAM.

    Raises:
        ConfigError: The GPU is not in the table.
    """
    nodes, ram_gb = max(1, world_size // ranks_per_node), machine.ram_bytes / 1e9
    if not on_gpu or not machine.gpus:
        return Cluster(nodes, ranks_per_node, "cpu", gpu_memory_gb=ram_gb / ranks_per_node, ram_gb=ram_gb)
    links = nvml_links()
    found: dict[str, Any] = {}
    key = key_of(machine.gpus[0].name)
    if links is not None and ranks_per_node > 1:
        bridged = all("NVLink" in link for link in links[:ranks_per_node])
        found["intra"] = "nvlink" if bridged and gpu_table()[key].nvlink is not None else "pcie"
    memory = (machine.gpu_bytes or 0) / 1e9
    return Cluster(nodes, ranks_per_node, key, gpu_memory_gb=memory, ram_gb=ram_gb, **found)


def row_length(rows: Sequence[Any], limit: int | None) -> int:
    """Tokens of the longest of some rows of a data set, of what the model takes at most, or 2048.

    Args:
        rows: Mappings with `input_ids`; others are not looked at.
        limit: Longest row that the model takes; None if it does not say.
    """
    ids = [row["input_ids"] for row in rows if hasattr(row, "keys") and "input_ids" in row]
    lengths = [one.shape[-1] if hasattr(one, "shape") else len(one) for one in ids if hasattr(one, "__len__")]
    longest = max(lengths, default=0) or 2048
    return min(longest, limit) if limit else longest
