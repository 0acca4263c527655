"""Compiles the library of soft CUDA devices into build/softcuda; needs g++ and the headers that torch comes with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path


SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "softcuda"


def torch_folder() -> Path:
    """Where torch is, without importing it: the library must be there first."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torch is not installed: run `make setup`")
    return Path(found.origin).parent


def library() -> Path:
    """The path of the library for these sources and this torch, which need not exist yet."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return BUILD / f"libsoftcuda-{digest.hexdigest()[:12]}.so"


def build() -> Path:
    """Compile what is not compiled yet, all files as one: torch's headers take longer than what is written here."""
    target = library()
    if target.exists():
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    torch = torch_folder()
    unfinished = target.with_suffix(f".{os.getpid()}")
    command = [
        "g++",
        "-O0",
        "-std=c++20",
        "-fPIC",
        "-shared",
        f"-I{torch / 'include'}",
        f"-I{SOURCES}",
        "-x",
        "c++",
        "-",
    ]
    command += ["-o", str(unfinished), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    files = "".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    subprocess.run(command, input=files.encode(), check=True)
    unfinished.rename(target)
    return target


if __name__ == "__main__":
    start = time.perf_counter()
    sys.stdout.write(f"{build()} in {time.perf_counter() - start:.1f} s\n")
