"""What this machine has: GPUs, cores, RAM, disk, networks, and what an earlier run left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final


CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: As its driver says.
        num_bytes: Memory.
        capability: Compute capability; (8, 0) is Ampere, the first with bf16.
    """

    name: str
    num_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What the rules about hardware look at.

    Args:
        gpus: Those that torch can use.
        ram_bytes: Of the machine.
        locks: Unfinished builds of compiled ops that nobody works on; see `stale_locks`.
    """

    gpus: tuple[Gpu, ...]
    ram_bytes: int
    locks: tuple[Path, ...] = ()

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU, None without one."""
        return min((gpu.num_bytes for gpu in self.gpus), default=None)


def this_machine() -> Machine:
    """What is here; imports torch."""
    import psutil

    limit = memory_limit()
    total = psutil.virtual_memory().total
    return Machine(gpus(), total if limit is None else min(total, limit), tuple(stale_locks(extensions_folder())))


def memory_limit(file: Path = CGROUP_LIMIT) -> int | None:
    """Bytes of RAM that a container may use; None without a limit."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(one.name, one.total_memory, (one.major, one.minor)) for one in found)


def extensions_folder() -> Path:
    """Where torch builds compiled ops."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def stale_locks(folder: Path) -> Iterator[Path]:
    """Lock files of ops that have no library: after a killed build every later run waits for them, silently."""
    for lock in sorted(folder.glob("**/lock")):
        if not any(lock.parent.glob("*.so")):
            yield lock
