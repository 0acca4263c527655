"""Checkpoint folders: made aside, listed in a manifest, renamed into place, and taken away whole.

A folder named `checkpoint-N` is complete or absent. What a killed job leaves behind has other names (`LEFTOVERS`), and is
removed by the next save or resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_parallel.errors import CheckpointError


STAGING = ".incomplete"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
REPLACED, REMOVED = ".replaced", ".removed"
NAME = re.compile(r"^checkpoint-(\d+)$")
SPARE = re.compile(r"^\.(checkpoint-\d+)\.(replaced|removed)$")
BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of one file.

    Args:
        bytes: Its length.
        sha256: Of its content, in hex.
    """

    bytes: int
    sha256: str


def files_of(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it, sorted; the manifest itself is not among them."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def record(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Bring files to disk, and say what they are."""
    found = {}
    for name in names:
        path = folder / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[name] = FileRecord(path.stat().st_size, _digest(path))
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """List the files of a folder that is about to be published.

    Args:
        folder: The folder.
        files: Every file in it.
        facts: What else is worth knowing of it, such as the number of tensors.
    """
    listed = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in sorted(files.items())}
    (folder / MANIFEST).write_text(json.dumps({"format": 1, **facts, "files": listed}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """The files that a folder must have; None if it was made by something that lists none.

    Raises:
        CheckpointError: The manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text())["files"]
        return {name: FileRecord(int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}. It is truncated or damaged.") from error


def missing_part(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint, by names and lengths of its files; None if it is one."""
    try:
        listed = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    if listed is None:
        # Made by the stock Trainer, which writes its state last.
        return None if (folder / STATE).is_file() else f"{folder} has neither {MANIFEST} nor {STATE}"
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{path} does not exist, but {MANIFEST} lists it"
        if path.stat().st_size != entry.bytes:
            return f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {entry.bytes}: it is truncated or damaged"
    return None


def verify(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compare a folder with its manifest: lengths of all files, and the content of one file in `shares`.

    Raises:
        CheckpointError: A file is missing, truncated or damaged; names it.
    """
    problem = missing_part(folder)
    if problem is not None:
        raise CheckpointError(f"{problem}. Resume from another checkpoint: {_others(folder)}")
    for name, entry in list((read_manifest(folder) or {}).items())[share::shares]:
        if _digest(folder / name) != entry.sha256:
            raise CheckpointError(
                f"{folder / name} is damaged: its content is not what {MANIFEST} says (sha256 {entry.sha256[:12]}...). "
                f"Resume from another checkpoint: {_others(folder)} If you changed the file on purpose, delete "
                f"{folder / MANIFEST}."
            )


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
    shutil.rmtree(run_dir / STAGING, ignore_errors=True)
    for path in list(run_dir.iterdir()) if run_dir.is_dir() else ():
        match = SPARE.match(path.name)
        if match and match[2] == "replaced" and not (run_dir / match[1]).exists():
            path.rename(run_dir / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Give a finished folder its final name, atomically; what was there before stays until the new one is in place."""
    for path in [*staged.rglob("*"), staged]:
        sync(path)
    old = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        staged.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rotate(run_dir: Path, limit: int | None, kept: Path, best: str | None) -> None:
    """Remove the oldest checkpoints beyond `limit`, but not `kept`, which was just published, and not the best one.

    Each goes under another name first: a kill in the middle of a removal leaves no folder that looks like a checkpoint.
    """
    if limit is None or limit <= 0:
        return
    spared = {kept.resolve()} | ({Path(best).resolve()} if best else set())
    oldest_first = sorted((path for _, path in _numbered(run_dir)), key=lambda path: (path.stat().st_mtime, path.name))
    surplus = len(oldest_first) - max(limit, len(spared))
    for path in [path for path in oldest_first if path.resolve() not in spared][: max(0, surplus)]:
        gone = path.with_name(f".{path.name}{REMOVED}")
        _remove(gone)
        path.rename(gone)
        _remove(gone)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
