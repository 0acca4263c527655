"""The manifest of a folder: every file that it must hold, with its length and hash.

A manifest says nothing but what is there: names inside the folder, of regular files. Whatever it says otherwise, and whatever
lies beside what it lists, was not written by a save and is refused before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_parallel.checkpoints.reader import open_regular
from hf_parallel.errors import CheckpointError


MANIFEST = "manifest.json"
FORMAT = 1
OPEN = "open"
RUN = "run"  # of which launch the checkpoint is
SHA256 = re.compile(r"[0-9a-f]{64}")
BLOCK = 1 << 22
LONGEST_JSON = 1 << 28  # bytes
# What file systems and desktops leave by themselves, and nobody reads.
DROPPINGS = re.compile(r"\.nfs[0-9a-f]+|\.DS_Store")
# What training, merging or stock code would read of a checkpoint, whatever the manifest says.
READ = re.compile(
    r"(model|pytorch_model|adapter_model|consolidated).*|.*\.(safetensors|bin|pt|pth|py|distcp)|config\.json"
    r"|training_state.*|trainer_state\.json|rng_state.*|optimizer.*"
)


@dataclass(frozen=True)
class FileRecord:
    """A file that a manifest lists.

    Args:
        bytes: Length of the file.
        sha256: Digest of its content, in hex.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Args:
        files: Every file by its name in the folder.
        is_open: Whether callbacks were still to add files when it was written.
        run: Facts of a run whose launcher starts processes again: `launches` (its launchers), `writer` (the process of
            rank 0), `call` (of `train()`, from 0) and `rows` (in an optimizer step); None otherwise.
    """

    files: Mapping[str, FileRecord]
    is_open: bool
    run: Mapping[str, Any] | None = None


def files_of(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it, sorted; the manifest itself is not among them.

    Raises:
        CheckpointError: Something is neither a file nor a folder, such as a symbolic link.
    """
    found = []
    for name, mode in _entries(folder):
        if stat.S_ISREG(mode):
            found.append(name)
        elif not stat.S_ISDIR(mode):
            raise CheckpointError(f"{folder / name} is {_kind(mode)}. {_COPY_IT}")
    return sorted(name for name in found if name != MANIFEST)


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and mode of everything below a folder, links as links."""
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(path)
                yield path.relative_to(folder).as_posix(), mode


_COPY_IT = "A checkpoint may contain regular files only: replace it by a copy of the file (cp -L)."


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a folder" if stat.S_ISDIR(mode) else "no regular file"


def is_regular(path: Path) -> bool:
    """Whether there is a file of this name itself, not a link to one."""
    return path.is_file() and not path.is_symlink()


def record(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Flush files to disk and describe them."""
    found = {}
    for name in names:
        path = folder / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[name] = FileRecord(path.stat().st_size, digest(path))
    return found


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    found = hashlib.sha256()
    with open(open_regular(path), "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def write_manifest(folder: Path, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """List the files of a folder that is about to be published, or of a published one; what was there is replaced at once.

    Args:
        folder: The folder.
        files: Every file in it.
        facts: Further facts, such as the number of tensors.
    """
    listed = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in sorted(files.items())}
    aside = folder.with_name(f".{folder.name}.{MANIFEST}")
    with aside.open("w") as file:
        file.write(json.dumps({"format": FORMAT, **facts, "files": listed}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, folder / MANIFEST)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object out of a file that a save wrote.

    Raises:
        CheckpointError: It is no regular file, or not JSON, or says a key twice; names it.
    """
    try:
        with open(open_regular(path), "rb") as file:
            text = file.read(LONGEST_JSON + 1)
        if len(text) > LONGEST_JSON:
            raise ValueError(f"it has more than {LONGEST_JSON} bytes")
        found = json.loads(text.decode(), object_pairs_hook=_once)
        if not isinstance(found, dict):
            raise TypeError(f"it holds {found!r:.60} instead of a mapping")
    except (ValueError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r:.300}. It is truncated or damaged.") from error
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if the folder was written by something that writes none.

    Raises:
        CheckpointError: The manifest cannot be read, or says what no save says.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link. {_COPY_IT}")
    found = read_json(path)
    problem = _odd_facts(found) or next(filter(None, map(_odd_entry, found["files"].items())), None)
    if problem is not None:
        raise CheckpointError(
            f"{path} cannot be read: {problem}. It is truncated or damaged, or was not written by a save."
        )
    files = {name: FileRecord(entry["bytes"], entry["sha256"]) for name, entry in found["files"].items()}
    return Manifest(files, found.get(OPEN, False), found.get(RUN))


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """The files that a folder must have; None if it was made by something that lists none.

    Raises:
        CheckpointError: For the reasons of `load_manifest`.
    """
    found = load_manifest(folder)
    return None if found is None else dict(found.files)


def is_count(value: object) -> bool:
    """Whether a value out of JSON is a whole number that is not negative."""
    return type(value) is int and value >= 0


def _odd_facts(found: Mapping[str, Any]) -> str | None:
    """Describe a fact in a manifest, beside its files, that no save writes; None if there is none."""
    files, tensors = found.get("files"), found.get("tensors", {})
    if found.get("format") != FORMAT or type(found["format"]) is not int:
        return f"format={found.get('format')!r:.60}, and this version reads {FORMAT}"
    if not isinstance(files, dict) or not files:
        return f"files={files!r:.60} lists no file"
    if not is_count(found.get("step", 0)):
        return f"step={found['step']!r:.60} is not a number of steps"
    if not isinstance(tensors, dict) or not all(map(is_count, tensors.values())):
        return f"tensors={tensors!r:.60} are no numbers of tensors"
    if not _is_run(found.get(RUN)):
        return f"{RUN}={found[RUN]!r:.100} is not what a save says of its launch"
    return None if type(found.get(OPEN, False)) is bool else f"{OPEN}={found[OPEN]!r:.60} is neither true nor false"


def _is_run(run: object) -> bool:
    if run is None:
        return True
    if not isinstance(run, dict) or run.keys() != {"launches", "writer", "call", "rows"}:
        return False
    launches = run["launches"]
    if not isinstance(launches, list) or not all(isinstance(each, str) for each in launches):
        return False
    return isinstance(run["writer"], str) and is_count(run["call"]) and is_count(run["rows"])


def _odd_entry(item: tuple[str, Any]) -> str | None:
    """Describe an entry for a file that no save writes; None if it is a normal one."""
    name, entry = item
    if not is_inside(name) or name == MANIFEST:
        return f"{name!r:.200} is not the name of a file inside of it"
    if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
        return f"{name} has {entry!r:.100} instead of bytes and sha256"
    if not is_count(entry["bytes"]):
        return f"{name} has bytes={entry['bytes']!r:.60}, which is no length"
    if not isinstance(entry["sha256"], str) or not SHA256.fullmatch(entry["sha256"]):
        return f"{name} has sha256={entry['sha256']!r:.80}, which is not 64 hexadecimal digits"
    return None


def is_inside(name: object) -> bool:
    """Whether a name leads to a file inside the folder it is used in, and is written in one way only."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def is_bare(name: object) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return is_inside(name) and "/" not in str(name)


def missing_file(folder: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Describe the first listed file that a folder lacks or has in another length; None if all are there."""
    for name, entry in files.items():
        path = folder / name
        mode = None
        for step in [*reversed([each for each in path.parents if each != folder and folder in each.parents]), path]:
            try:
                mode = os.lstat(step).st_mode
            except OSError:
                return f"{path} does not exist, but {MANIFEST} lists it"
            if not (stat.S_ISREG(mode) if step == path else stat.S_ISDIR(mode)):
                return (
                    f"{step} is {_kind(mode)}, and {MANIFEST} lists {'a file' if step == path else name}. {_COPY_IT}"
                )
        size = os.lstat(path).st_size
        if size != entry.bytes:
            return f"{path} has {size} bytes, {MANIFEST} says {entry.bytes}: it is truncated or damaged"
    return None


def stray_entry(folder: Path, listed: Manifest | None) -> str | None:
    """Describe the first thing in a folder that no save put there; None if there is nothing.

    Args:
        folder: The folder.
        listed: Its manifest; None: it has none, and only links, devices and the like are looked for.
    """
    folders = {parent.as_posix() for name in (listed.files if listed else ()) for parent in Path(name).parents}
    for name, mode in sorted(_entries(folder)):
        if stat.S_ISDIR(mode):
            known = listed is None or name in folders or listed.is_open
        elif not stat.S_ISREG(mode):
            return f"{folder / name} is {_kind(mode)}. {_COPY_IT}"
        else:
            known = listed is None or name in listed.files or name == MANIFEST or _is_harmless(name, listed.is_open)
        if not known:
            return (
                f"{folder / name} is not in {MANIFEST}: no save wrote it, and what reads the folder may take it for a part "
                f"of the checkpoint. Move it away; or, if it belongs there, delete {folder / MANIFEST}, which leaves the "
                "folder unchecked."
            )
    return None


def _is_harmless(name: str, is_open: bool) -> bool:
    bare = name.rsplit("/", 1)[-1]
    return DROPPINGS.fullmatch(bare) is not None or (is_open and not READ.fullmatch(name) and not READ.fullmatch(bare))
