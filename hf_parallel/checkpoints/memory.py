"""Checkpoints in the memory of this machine: a folder of its file system in RAM, which outlives the processes of a run."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from hf_parallel.errors import CheckpointError


SHARED_MEMORY = Path("/dev/shm")


def memory_folder(output_dir: Path) -> Path:
    """The folder in memory for the checkpoints of a run that writes to `output_dir`."""
    name = hashlib.sha256(os.fsencode(output_dir.resolve())).hexdigest()[:16]
    return SHARED_MEMORY / f"hf_parallel-{os.getuid()}-{name}"


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is in the memory of this machine."""
    return folder.is_relative_to(SHARED_MEMORY)


def make_memory_folder(folder: Path) -> None:
    """Make it for this user alone.

    Raises:
        CheckpointError: Somebody else has made it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"{folder} is not a folder of this user alone: checkpoints in memory could be read or replaced by others. Remove it, "
            "or set checkpoint.memory_steps to 0."
        )


def remove_memory_folder(folder: Path) -> None:
    """Give the memory back, if there is any; nothing of somebody else is touched."""
    if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)
