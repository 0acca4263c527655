"""Which process is which: of this machine, of this container, and not a later one with the same number."""

from __future__ import annotations

import os
from pathlib import Path


def host_identity() -> tuple[str | None, str | None]:
    """The boot of the machine and the container's space of process numbers; (None, None) where /proc does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return None, None


def birth_of(pid: int) -> int | None:
    """When a process was started, in clock ticks of the machine; None if there is none or /proc does not say."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(status.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
