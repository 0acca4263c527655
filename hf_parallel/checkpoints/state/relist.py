"""Files that user code puts into a checkpoint folder: taken along, and listed like all others."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_parallel.checkpoints.agree import everyone, together
from hf_parallel.checkpoints.manifest import MANIFEST, FileRecord, record, write_manifest
from hf_parallel.mesh.groups import Mesh


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """A checkpoint that was just published.

    Args:
        folder: Its folder.
        files: Files that its manifest lists.
        facts: Other facts of its manifest.
        looks: Name -> length and time of every file, as this rank saw them then.
    """

    folder: Path
    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any]
    looks: Mapping[str, tuple[int, int]]


def looks_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Length and time of every file below a folder but its manifest; what is not seen yet counts as new later."""
    found: dict[str, tuple[int, int]] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns)
            else:
                logger.warning("hf_parallel: %s is no regular file: the checkpoint cannot be resumed with it.", path)
    return {name: look for name, look in found.items() if name != MANIFEST}


def relist(published: Published, mesh: Mesh) -> None:
    """List what was added to, changed in or taken from a checkpoint since it was published; collective.

    Raises:
        CheckpointError: It cannot be read or written on some rank; the same text on all.
    """
    folder, before = published.folder, published.looks
    if not all(everyone(folder.is_dir())):
        return  # user code moved it away
    with together(mesh, folder):
        now = looks_of(folder)
    changed = everyone([name for name, look in now.items() if before.get(name) != look])
    gone = everyone([name for name in before if name not in now])
    seen_by: dict[str, int] = {}
    for rank, names in enumerate(changed):
        for name in names:
            seen_by.setdefault(name, rank)
    with together(mesh, folder):
        mine = record(folder, [name for name, rank in seen_by.items() if rank == mesh.rank])
    added = {name: entry for each in everyone(mine) for name, entry in each.items()}
    with together(mesh, folder):
        if mesh.rank == 0:
            kept = {name: entry for name, entry in published.files.items() if not any(name in each for each in gone)}
            write_manifest(folder, {**kept, **added}, published.facts)


def adopt(staged: Path, final: Path) -> None:
    """Move what user code put under the final name of a folder into the folder before it gets that name."""
    for path in sorted(final.rglob("*")):
        target = staged / path.relative_to(final)
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        else:
            os.replace(path, target)
