"""One verdict for all ranks: what fails on one of them is the same error on every one, and no rank waits forever."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hf_parallel.checkpoints import memory
from hf_parallel.errors import CheckpointError, UnsupportedError
from hf_parallel.mesh.groups import Mesh


T = TypeVar("T")


class AgreedError(CheckpointError):
    """An error that all ranks know of already."""


@contextmanager
def together(
    mesh: Mesh, folder: Path, group: dist.ProcessGroup | None = None, *, writes: bool = True
) -> Iterator[None]:
    """Do something on every rank; if it fails on one, raise its error on all. Ends with a barrier.

    What is inside must not leave other ranks waiting when it fails on one: collective steps that can fail have their own.

    Args:
        mesh: This rank's mesh.
        folder: Folder that is written or read, for the message.
        group: Ranks that take part; None for all ranks.
        writes: Whether it is written: the message then says how much space is left.

    Raises:
        CheckpointError: With the text of the first rank that failed.
    """
    cause: Exception | None = None
    try:
        yield
    except AgreedError:
        raise
    except Exception as error:  # noqa: BLE001  raised below, on every rank
        cause = error
    text = None if cause is None else _text(cause, folder, mesh, writes)
    first = _first(text, group)
    if first is not None:
        raise AgreedError(first) from cause


@contextmanager
def naming_folder(mesh: Mesh, folder: Path) -> Iterator[None]:
    """Write a folder on this rank, without others: what fails says which folder, and how much space is left.

    Raises:
        CheckpointError: It could not be written.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(_text(error, folder, mesh, writes=True)) from error


def raise_anywhere(problem: str | Exception | None) -> None:
    """Raise on every rank what went wrong on any; collective over the world.

    Args:
        problem: Problem of this rank, None without one.

    Raises:
        CheckpointError: With the text of the first rank that had a problem.
    """
    cause = problem if isinstance(problem, Exception) else None
    known = cause is None or isinstance(cause, CheckpointError)
    text = None if problem is None else str(problem) if known else f"{type(cause).__name__}: {problem}"
    first = _first(text)
    if first is not None:
        raise CheckpointError(first) from cause


def _first(text: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The first value, in the order of ranks, that is not None; collective."""
    return next((each for each in everyone(text, group) if each is not None), None)


def everyone(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a value from every rank of the group, in the order of ranks; collective. Without a process group, `mine` alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _text(error: Exception, folder: Path, mesh: Mesh, writes: bool) -> str:
    who = f"{mesh.describe()}: " if mesh.shape.world_size > 1 else ""
    if isinstance(error, UnsupportedError) or (isinstance(error, CheckpointError) and not writes):
        return f"{who}{error}"
    what = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    if not writes:
        return f"{who}{folder} cannot be read: {what}"
    or_else = "set checkpoint.memory_steps to 0" if memory.is_in_memory(folder) else "lower save_total_limit"
    return (
        f"{who}{folder} could not be written: {what} ({free_space(folder)} free there). Checkpoints that were complete "
        f"before are as they were. Free some space, or {or_else}, and resume."
    )


def free_space(folder: Path) -> str:
    """Free space of the file system of a folder, as text."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return f"{free / 1e9:.2f} GB" if free >= 1e9 else f"{free / 1e6:.2f} MB"
