"""Facts about this machine: GPUs, cores, RAM, disk, networks, and leavings of an earlier run."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_parallel.machine.ram import memory_limit as memory_limit
from hf_parallel.machine.ram import ram_limit


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: Name by its driver.
        num_bytes: Memory.
        capability: Compute capability; (8, 0) is Ampere, the first with bf16.
    """

    name: str
    num_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The hardware that rules about settings look at.

    Args:
        gpus: GPUs that torch can use.
        ram_bytes: Bytes of RAM of the machine.
        locks: Builds of compiled ops that have not ended; see `stale_locks`.
    """

    gpus: tuple[Gpu, ...]
    ram_bytes: int
    locks: tuple[Path, ...] = ()

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU, None without one."""
        return min((gpu.num_bytes for gpu in self.gpus), default=None)


def this_machine() -> Machine:
    """The hardware of this machine; imports torch."""
    import psutil

    limit = ram_limit()
    total = psutil.virtual_memory().total
    return Machine(gpus(), total if limit is None else min(total, limit), tuple(stale_locks(extensions_folder())))


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(one.name, one.total_memory, (one.major, one.minor)) for one in found)


def extensions_folder() -> Path:
    """The folder in which torch builds compiled ops."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def stale_locks(folder: Path) -> Iterator[Path]:
    """Lock files of ops: after a killed build every later run waits for them, silently, also where a library is there."""
    yield from sorted(folder.glob("**/lock"))


def peer_access(count: int) -> bool:
    """Whether every two GPUs can read each other's memory directly."""
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def free_gpu_bytes(count: int) -> list[int]:
    """Memory of each GPU that nobody holds; makes a CUDA context on each."""
    import torch

    return [int(torch.cuda.mem_get_info(index)[0]) for index in range(count)]


def nvml_links() -> list[str] | None:
    """Connection of each GPU, as its driver says; None without pynvml or a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [f"{_nvlinks(nvml, handle)}{_pcie(nvml, handle)}" for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _nvlinks(nvml: Any, handle: Any) -> str:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:  # this GPU has no such link
            break
    return f"{active} NVLinks, " if active else ""


def _pcie(nvml: Any, handle: Any) -> str:
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return f"PCIe {generation} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
    except nvml.NVMLError:  # virtual GPUs do not say
        return "PCIe of unknown speed"


def networks() -> dict[str, float]:
    """Name -> Gbit/s (0 if not known) of each network interface that is up, loopback left out."""
    import psutil

    addresses = psutil.net_if_addrs()
    return {
        name: state.speed / 1000
        for name, state in psutil.net_if_stats().items()
        if state.isup and not _is_loopback(name, addresses.get(name, []))
    }


def _is_loopback(name: str, addresses: Sequence[Any]) -> bool:
    return name == "lo" or any(str(one.address).startswith("127.") for one in addresses)


def host_address() -> str | None:
    """Address that this machine's own name resolves to; None if it does not."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
