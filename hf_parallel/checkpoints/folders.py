"""Checkpoint folders: made aside, listed in a manifest, renamed into place, and taken away whole.

A folder named `checkpoint-N` is complete or absent. What a killed job leaves behind has other names (`LEFTOVERS`), and is
removed by the next save or resume.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hf_parallel.checkpoints.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    digest,
    files_of,
    load_manifest,
    missing_file,
    read_manifest,
    record,
    stray_entry,
    write_manifest,
)
from hf_parallel.errors import CheckpointError


__all__ = ["MANIFEST", "FileRecord", "files_of", "read_manifest", "record", "write_manifest"]

logger = logging.getLogger(__name__)

STAGING = ".incomplete"
STATE = "trainer_state.json"
REPLACED, REMOVED = ".replaced", ".removed"
NAME = re.compile(r"^checkpoint-(0|[1-9][0-9]*)$")
SPARE = re.compile(r"^\.(checkpoint-[0-9]+)\.(replaced|removed)$")
PROBE = ".shared-"  # begins the names of files by which ranks look whether they share a folder
ASIDE = re.compile(rf"^\.checkpoint-[0-9]+\.manifest\.json$|^{re.escape(PROBE)}[0-9a-f]{{16}}(-[0-9]+)?$")


def missing_part(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint, by names and lengths of its files; None if it is one."""
    try:
        listed = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    if listed is None:
        # Made by the stock Trainer, which writes its state last.
        return None if (folder / STATE).is_file() else f"{folder} has neither {MANIFEST} nor {STATE}"
    return missing_file(folder, listed)


def verify(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compare a folder with its manifest: names and lengths of all files, and the content of one file in `shares`.

    Raises:
        CheckpointError: A file is missing, truncated, damaged, not listed or a link; names it.
    """
    listed = check_names(folder)
    for name, entry in [] if listed is None else list(listed.files.items())[share::shares]:
        if digest(folder / name) != entry.sha256:
            raise CheckpointError(
                f"{folder / name} is damaged: its content is not what {MANIFEST} says (sha256 {entry.sha256[:12]}...). "
                f"Resume from another checkpoint: {_others(folder)} If you changed the file on purpose, delete "
                f"{folder / MANIFEST}."
            )


def check_names(folder: Path) -> Manifest | None:
    """Compare a folder with its manifest by names and lengths; returns it, None if there is none.

    Raises:
        CheckpointError: A file is missing, truncated, not listed or a link; names it.
    """
    problem = missing_part(folder)
    if problem is not None:
        inside = complete_folders(folder) if folder.is_dir() else []
        if inside:
            raise CheckpointError(f"{problem.rstrip('.')}, but there is a checkpoint in it. Name {inside[0]}.")
        raise CheckpointError(f"{problem.rstrip('.')}. Take another checkpoint: {_others(folder)}")
    listed = load_manifest(folder)
    problem = stray_entry(folder, listed)
    if problem is not None:
        raise CheckpointError(problem)
    return listed


def _others(folder: Path) -> str:
    found = [path.name for path in complete_folders(folder.parent) if path != folder] if folder.parent.is_dir() else []
    return f"{', '.join(found)}." if found else "there is no other here."


def complete_folders(run_dir: Path) -> list[Path]:
    """All complete checkpoints of a run, the newest first."""
    numbered = sorted(_numbered(run_dir), reverse=True)
    return [path for _, path in numbered if missing_part(path) is None]


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and why later ones are passed over."""
    reasons: list[str] = []
    for _, path in sorted(_numbered(run_dir), reverse=True):
        problem = missing_part(path)
        if problem is None:
            return path, reasons
        reasons.append(problem)
    return None, reasons


def _numbered(run_dir: Path) -> Iterator[tuple[int, Path]]:
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        match = NAME.match(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def clean(run_dir: Path) -> None:
    """Take away what a killed job left: folders half written or half removed. A replaced one that has no successor returns."""
    _discard(run_dir / STAGING)
    for path in list(run_dir.iterdir()) if run_dir.is_dir() else ():
        match = SPARE.match(path.name)
        if match and match[2] == "replaced" and not (run_dir / match[1]).exists():
            path.rename(run_dir / match[1])
        elif match or ASIDE.match(path.name):
            _discard(path)


def publish(staged: Path, final: Path) -> None:
    """Give a finished folder its final name, atomically; what was there before stays until the new one is in place."""
    for path in [*staged.rglob("*"), staged]:
        sync(path)
    old = final.with_name(f".{final.name}{REPLACED}")
    if os.path.lexists(final):
        _discard(old)
        final.rename(old)
    try:
        staged.rename(final)
    except OSError:
        if os.path.lexists(old):
            old.rename(final)
        raise
    _discard(old)
    sync(final.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rotate(run_dir: Path, limit: int | None, kept: Path, best: str | None) -> None:
    """Remove checkpoints beyond `limit`, those of the lowest steps first, but not `kept`, which was just published, nor the best.

    Steps count, not times: a file system may give several folders one time, and a copy brings its own. What is a link to a
    folder elsewhere is left alone. Each goes under another name first: a kill in the middle of a removal leaves no folder that
    looks like a checkpoint.
    """
    if limit is None or limit <= 0:
        return
    spared = {kept.resolve()} | ({Path(best).resolve()} if best else set())
    here = [(step, path) for step, path in sorted(_numbered(run_dir)) if not path.is_symlink()]
    _warn_of_later_steps(here, kept)
    spared &= {path.resolve() for _, path in here}
    surplus = len(here) - max(limit, len(spared))
    for path in [path for _, path in here if path.resolve() not in spared][: max(0, surplus)]:
        gone = path.with_name(f".{path.name}{REMOVED}")
        try:
            _remove(gone)
            path.rename(gone)
        except OSError as error:
            logger.warning(
                "hf_parallel: %s is beyond save_total_limit and cannot be removed: %s.", path, error.strerror
            )
            continue
        _remove(gone)


def _warn_of_later_steps(found: list[tuple[int, Path]], kept: Path) -> None:
    match = NAME.match(kept.name)
    later = [path.name for step, path in found if match and step > int(match[1])]
    if later:
        logger.warning(
            "hf_parallel: %s is older than %s, which was just written, and has a higher step: "
            "resume_from_checkpoint=True would choose it. If it is of another run, move it out of %s.",
            later[-1],
            kept.name,
            kept.parent,
        )


def _remove(folder: Path) -> None:
    """Take away a checkpoint that has another name already."""
    _discard(folder)


def _discard(folder: Path) -> None:
    """Remove a folder, or a link to one; if it cannot be removed it stays under a name that no code takes for a checkpoint."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
