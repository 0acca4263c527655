"""Whether all ranks see one folder, asked before a run depends on it; and that one job at a time writes there."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from hf_parallel.checkpoints.agree import everyone, together
from hf_parallel.checkpoints.folders import PROBE
from hf_parallel.errors import CheckpointError
from hf_parallel.mesh.groups import Mesh


WAIT_S = 10.0  # for a file system that shows a new file a little later on other machines
PAUSE_S = 0.05


def require_shared(folder: Path, mesh: Mesh) -> None:
    """Refuse a folder that the ranks do not share: rank 0 writes a token there, which every rank must read; collective.

    Every rank also writes a file of its own there and removes it, as it will for its part of a checkpoint.

    Args:
        folder: The folder as this rank names it; made if it is not there.
        mesh: This rank's mesh.

    Raises:
        CheckpointError: Some ranks do not see what rank 0 wrote, or cannot write; the same text on all, with their machines.
    """
    if mesh.shape.world_size == 1:
        return
    token = everyone(secrets.token_hex(8))[0]
    path = folder / f"{PROBE}{token}"
    try:
        with together(mesh, folder):
            if mesh.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(token)
        problem = _problem(path, token, mesh.rank, WAIT_S)
        answers = everyone((problem, socket.gethostname(), str(folder)))
    finally:
        if mesh.rank == 0:
            path.unlink(missing_ok=True)
    if any(problem for problem, _, _ in answers):
        raise CheckpointError(_text(answers))


def _problem(path: Path, token: str, rank: int, wait_s: float) -> str | None:
    """Say why this rank cannot use the folder; None if it can."""
    deadline = time.monotonic() + wait_s
    while not _holds(path, token):
        if time.monotonic() > deadline:
            return "does not see"
        time.sleep(PAUSE_S)
    mine = path.with_name(f"{path.name}-{rank}")
    try:
        mine.write_text(token)
        mine.unlink()
    except OSError as error:
        return f"cannot write ({error.strerror}) beside"
    return None


def _holds(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def _text(answers: Sequence[tuple[str | None, str, str]]) -> str:
    """One sentence about all ranks with a problem."""
    odd = [
        f"rank {rank} on {host} ({folder}) {problem}"
        for rank, (problem, host, folder) in enumerate(answers)
        if problem
    ]
    shown = "; ".join(odd[:4]) + (f"; and {len(odd) - 4} more ranks" if len(odd) > 4 else "")
    _, host, folder = answers[0]
    return (
        f"output_dir={folder}: {shown} what rank 0 on {host} wrote there. Is this folder shared? Every rank writes its part of "
        f"a checkpoint there, and a resumed run reads it. Set output_dir to one folder on a file system that all machines mount, "
        "with the same path on every rank; or set save_strategy to 'no'."
    )


class Claim:
    """The right to write checkpoints to a folder, for as long as a save takes; other jobs that ask meanwhile are refused.

    A process that dies loses it. File systems without locks for folders grant it to everybody.

    Args:
        run_dir: The folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process has it."""
        return self._descriptor is not None

    def take(self) -> None:
        """Take it.

        Raises:
            CheckpointError: Another process has it.
        """
        if self._descriptor is not None:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise CheckpointError(
                    f"another process is writing a checkpoint to {self.run_dir}: two jobs would write into each other's. Stop "
                    "one of them, or give it another output_dir."
                ) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it back, if it was taken."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            except OSError:  # a file system without locks
                pass
            finally:
                os.close(descriptor)
