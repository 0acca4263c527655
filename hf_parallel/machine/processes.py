"""Tell processes apart: of this machine, of this container, and not a later one with the same number."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def host_identity() -> tuple[str | None, str | None]:
    """The boot of the machine and the container's space of process numbers; (None, None) where /proc does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return None, None


def birth_of(pid: int) -> int | None:
    """Time at which a process was started, in clock ticks of the machine; None if there is none or /proc does not say."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(status.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def identity_of(pid: int) -> str | None:
    """One word for a process that no other has, on any machine; None where /proc does not say."""
    (boot, space), birth = host_identity(), birth_of(pid)
    return None if boot is None or birth is None else f"{boot}/{space}/{pid}/{birth}"


def state_of(pid: int, birth: int | None) -> str:
    """State of a process of this machine: "" while it runs, else "stopped" or "ended", with how if it is known.

    Args:
        pid: Its number.
        birth: Time at which it was started; a later process may have the same number.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "ended"
    if birth is not None and int(fields[19]) != birth:
        return "ended"
    if fields[0] in "Tt":
        return "stopped"
    if fields[0] not in "ZX":
        return ""
    code, number = divmod(int(fields[49]), 256)  # of a process whose parent has not asked for it yet
    number &= 127
    if number:
        return f"ended by signal {number} ({signal.Signals(number).name})"
    return f"ended with exit code {code}"
