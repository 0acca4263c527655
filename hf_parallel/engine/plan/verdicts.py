"""Remembers from one start to the next what was found out about a model, in a folder that may be deleted at any time.

A verdict that is remembered wrongly would be wrong training without a word. So a verdict belongs to everything that it may
depend on (see `verdicts_of`), only success is remembered, and where something decides that is not known, nothing is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_parallel
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.identity import PACKAGES, UnknownError, digest_of_batch, identity_of
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "HF_PARALLEL_CACHE"
_IMPORTED_AT = time.time()


class Verdicts:
    """Verdicts about one model in one run; the same file for whoever asks the same.

    Args:
        folder: Folder of the files; None: nothing is remembered.
        about: Tells what all of them depend on; asked once, when the first is wanted.
    """

    def __init__(self, folder: Path | None = None, about: Callable[[], str] = str) -> None:
        self._folder, self._about = folder, about
        self._key: str | None = None

    def get(self, kind: str, of: object = "") -> Any:
        """Look up a verdict; None where none was stored, or the file cannot be read.

        Args:
            kind: Subject of the verdict.
            of: Thing that it depends on beside the model and the run; its text counts.
        """
        file, key = self._file(kind, of)
        if file is None:
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return content["verdict"] if content["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, kind: str, verdict: Any, of: object = "") -> None:
        """Remember a verdict, JSON data. Several ranks and runs may do so at once: a file is there whole or not at all."""
        file, key = self._file(kind, of)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    json.dump({"key": key, "verdict": verdict}, stream)
                Path(name).replace(file)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:  # a full or read-only disk: the next start takes as long as this one
            logger.debug("hf_parallel: %s: not remembered: %s", FOLDER_VARIABLE, error)

    def once(self, kind: str, of: object, check: Callable[[], bool]) -> bool:
        """Run a check that has not succeeded before; whether it has succeeded now or then.

        Args:
            kind: Subject of the verdict.
            of: Thing that it depends on, as for `get`.
            check: Returns whether it was made; what it raises is not remembered.
        """
        if self.get(kind, of) is True:
            return True
        has_succeeded = check()
        if has_succeeded:
            self.put(kind, True, of)
        return has_succeeded

    def _file(self, kind: str, of: object) -> tuple[Path | None, str]:
        if self._folder is None:
            return None, ""
        if self._key is None:
            try:
                self._key = self._about()
            except UnknownError as reason:
                logger.debug("hf_parallel: nothing is remembered about this model: %s", reason)
                self._folder = None
                return None, ""
        key = hashlib.sha256(f"{self._key}\n{kind}\n{of}".encode()).hexdigest()
        return self._folder / "verdicts" / f"{kind}-{key[:32]}.json", key


def cache_folder() -> Path | None:
    """The folder of the environment variable; None without one, or if it is empty."""
    named = os.environ.get(FOLDER_VARIABLE, "")
    return Path(named).expanduser() if named.strip() else None


def verdicts_of(
    model: nn.Module, config: HFParallelConfig, shape: MeshShape, device: torch.device, batch: Mapping[str, Any]
) -> Verdicts:
    """The verdicts about a model in a run.

    They depend on the model (`identity_of`), the settings, the layout, the batch that it is tried with, the device, the
    releases of Python and the packages, the files of this package, and the modes of torch that choose kernels.

    Args:
        model: The whole model.
        config: The settings.
        shape: Shape of the mesh.
        device: Device of the model.
        batch: Batch that plans are made with.
    """

    def about() -> str:
        facts = {
            "model": identity_of(model),
            "batch": digest_of_batch(batch),
            "settings": config.to_yaml_section(),
            "layout": repr(shape),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "releases": [platform.python_version(), torch.version.git_version, *map(_release, PACKAGES)],
            "package": _own_files(),
            "modes": _modes(),
        }
        return json.dumps(facts, sort_keys=True, default=str)

    return Verdicts(cache_folder(), about)


def _release(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _modes() -> list[Any]:
    backends = torch.backends.cuda
    return [
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        [
            flag()  # type: ignore[no-untyped-call]
            for flag in (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled)
        ],
    ]


@cache
def _own_files() -> str:
    """A digest of the files of this package.

    Raises:
        UnknownError: One was changed since this process has read them.
    """
    root, made = Path(hf_parallel.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        if file.stat().st_mtime > _IMPORTED_AT:
            raise UnknownError(f"{file.name} was changed after it was imported")
        made.update(f"{file.relative_to(root)}\n".encode())
        made.update(file.read_bytes())
    return made.hexdigest()
