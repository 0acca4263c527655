"""Machines: what a GPU can do, from a table with sources, and how a cluster of them is wired."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from hf_parallel.errors import ConfigError
from hf_parallel.planner.checks import all_of, choose, optional, whole
from hf_parallel.planner.constants import Constants, constants


TABLE: Final = Path(__file__).parent / "hardware.json"
USUAL_NODE: Final = 8  # GPUs of the node whose network the table gives
# GPUs that are seldom bridged: their table entry has NVLink, but a machine has PCIe unless it is said.
BRIDGED: Final = frozenset({"rtx3090", "a6000", "h100_pcie"})
DEFAULT_RAM: Final = 64e9  # a GPU
DEFAULT_DISK: Final = 2e9


@dataclass(frozen=True)
class Gpu:
    """Rates and sizes of one accelerator; FLOP/s, bytes, bytes per second of one direction.

    Attributes:
        peak: Dense bf16 products.
        fp32: Products without tensor cores.
        attention: Fused causal attention, forward and backward.
        flash: The same in the kernels that are made for this GPU.
        achievable: Part of the peak that large products reach; above 1 for a card whose clock is above that of the peak.
        memory: What a process can allocate at most, the context included.
        bandwidth: Bytes per second of its memory.
        nvlink: Bytes per second to the other GPUs of the node, None without NVLink.
        pcie: Bytes per second to the host, and to other GPUs without NVLink.
        network: Bytes per second of a whole node to other nodes.
        source: Where the numbers are from.
        tuned: Part of the peak that large products reach in the stacks of `kernels: fused`; None: as in others.
        cache: Bytes of its second-level cache, None where the fit of the constants is of cards with such caches.
        cached: Bytes per second of that cache.
    """

    peak: float
    fp32: float
    attention: float
    flash: float
    achievable: float
    memory: float
    bandwidth: float
    nvlink: float | None
    pcie: float
    network: float
    source: str
    tuned: float | None = None
    cache: float | None = None
    cached: float | None = None


@functools.cache
def gpu_table() -> Mapping[str, Gpu]:
    """Every known accelerator by its key."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Gpu(**entry) for name, entry in content["gpus"].items()}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs and the links between them; None is the hardware table's value.

    Args:
        nodes: Machines.
        gpus_per_node: GPUs of each.
        gpu: A key of the hardware table, such as "h100", "a100_80" or "rtx3090".
        intra: Link between the GPUs of a node, "nvlink" or "pcie".
        intra_gb_s: GB/s of that link, of one GPU and in one direction.
        inter_gbit_s: Gbit/s of all network links of a node together, in one direction.
        gpu_memory_gb: GB of one GPU.
        ram_gb: GB of one node.
        disk_gb_s: GB/s of a node's disk.

    Raises:
        ConfigError: Values are of the wrong kind, or the GPU is unknown; names the nearest ones.
    """

    nodes: int
    gpus_per_node: int
    gpu: str
    intra: Literal["nvlink", "pcie"] | None = None
    intra_gb_s: float | None = None
    inter_gbit_s: float | None = None
    gpu_memory_gb: float | None = None
    ram_gb: float | None = None
    disk_gb_s: float | None = None

    def __init__(  # noqa: PLR0913 - the names are the interface
        self,
        nodes: int,
        gpus_per_node: int,
        gpu: str,
        *,
        intra: Literal["nvlink", "pcie"] | None = None,
        intra_gb_s: float | None = None,
        inter_gbit_s: float | None = None,
        gpu_memory_gb: float | None = None,
        ram_gb: float | None = None,
        disk_gb_s: float | None = None,
    ) -> None:
        sizes = {
            "intra_gb_s": intra_gb_s,
            "inter_gbit_s": inter_gbit_s,
            "gpu_memory_gb": gpu_memory_gb,
            "ram_gb": ram_gb,
            "disk_gb_s": disk_gb_s,
        }
        checks: dict[str, Callable[[], Any]] = {
            "nodes": lambda: whole("nodes", nodes),
            "gpus_per_node": lambda: whole("gpus_per_node", gpus_per_node),
            "gpu": lambda: choose("gpu", gpu, gpu_table()),
            "intra": lambda: None if intra is None else choose("intra", intra, ("nvlink", "pcie")),
        }
        for name, value in sizes.items():
            checks[name] = functools.partial(optional, name, value)
        for name, value in all_of(checks).items():
            object.__setattr__(self, name, value)
        if intra == "nvlink" and intra_gb_s is None and self.card.nvlink is None:
            raise ConfigError(
                f"intra='nvlink': {gpu} has no NVLink in the table. Set intra to pcie, or give intra_gb_s."
            )

    @property
    def card(self) -> Gpu:
        """The table's entry."""
        return gpu_table()[self.gpu]

    def constants(self, tokens: float) -> Constants:
        """Constants of the cost formulas, for runs on this cluster.

        Args:
            tokens: Tokens of a rank and pass.
        """
        return constants()

    @property
    def regained(self) -> float:
        """Share of idle time that is won back because idle ranks free cores for busy ones, 0 to 2."""
        return 0.0

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def has_nvlink(self) -> bool:
        if self.intra is not None:
            return self.intra == "nvlink"
        return self.card.nvlink is not None and self.gpu not in BRIDGED

    @property
    def intra_bytes_s(self) -> float:
        """Bytes per second that one GPU sends to the others of its node."""
        if self.intra_gb_s is not None:
            return self.intra_gb_s * 1e9
        return float(self.card.nvlink) if self.has_nvlink and self.card.nvlink else self.card.pcie

    @property
    def inter_bytes_s(self) -> float:
        """Bytes per second that a whole node sends to other nodes."""
        if self.inter_gbit_s is not None:
            return self.inter_gbit_s * 1e9 / 8
        return self.card.network * (min(1.0, self.gpus_per_node / USUAL_NODE) if self.card.network > 50e9 else 1.0)

    @property
    def gpu_bytes(self) -> float:
        return self.card.memory if self.gpu_memory_gb is None else self.gpu_memory_gb * 1e9

    @property
    def ram_bytes(self) -> float:
        """Bytes of host memory of a node."""
        return DEFAULT_RAM * self.gpus_per_node if self.ram_gb is None else self.ram_gb * 1e9

    @property
    def disk_bytes_s(self) -> float:
        """Bytes per second of a node's disk."""
        return DEFAULT_DISK if self.disk_gb_s is None else self.disk_gb_s * 1e9
