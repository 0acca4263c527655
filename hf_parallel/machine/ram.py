"""Finds out how much host memory this process may take: what the machine has free, and what its cgroups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final


CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
NO_LIMIT: Final = 1 << 60  # version 1 writes the largest number of pages for "none"


def free_ram() -> int:
    """Bytes that this process can still allocate: free on the machine, and below every limit of its container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *(limit - used for limit, used in limits())]))


def ram_limit() -> int | None:
    """Bytes of RAM that this process may use at most; None without a limit."""
    return min((limit for limit, _ in limits()), default=None)


def limits(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of every group that this process is in and that has a limit, the outer ones too.

    What the page cache holds and the kernel would give back is not in use. Source: the kernel's cgroup-v1/memory.rst
    and cgroup-v2.rst.
    """
    for root, path, files in _hierarchies(cgroups, membership):
        inner = root / path.lstrip("/")
        # In a container the path may be the host's, which is not there: its own group is then the root.
        folder = inner if inner.is_dir() else root
        while True:
            limit, used = memory_limit(folder / files[0]), memory_limit(folder / files[1])
            if limit is not None and limit < NO_LIMIT:
                cache = _cache(folder / "memory.stat", files[2])
                yield limit, max(0, (used or 0) - cache)
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _hierarchies(cgroups: Path, membership: Path) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    """Root, path of this process and names of the files, for each version of control groups that is mounted."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    parts = [line.split(":", 2) for line in lines]
    paths = {controllers: path for number, controllers, path in (part for part in parts if len(part) == 3)}
    second = ("memory.max", "memory.current", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    unified = cgroups / "unified" if (cgroups / "unified").is_dir() else cgroups
    yield unified, paths.get("", "/"), second
    named = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    if (cgroups / "memory").is_dir():
        yield cgroups / "memory", named, first


def memory_limit(file: Path) -> int | None:
    """The number of bytes in a file of a control group; None if it is not there or says `max`."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() and len(text) < 30 else None


def _cache(file: Path, key: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{key} ")]
    return int(found[0]) if found and found[0].isdigit() else 0
