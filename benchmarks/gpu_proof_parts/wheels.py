"""Packages for a machine without a network and without pip: wheels are unpacked into a folder that Python looks into first.

Needs the standard library only.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath


WANTED_TESTS = ("pytest", "pytest-timeout")
OF_THE_MACHINE = re.compile(r"torch|triton|nvidia[-_].*|cuda[-_].*")
NOT_NEEDED = re.compile(r"datasets")  # by no step
PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def wanted(pyproject: Path) -> list[str]:
    """The releases that this project takes, without torch: it brings CUDA's libraries and comes with the machine."""
    named = {
        re.match(r"[\w.-]+", one)[0]: one  # type: ignore[index]
        for one in tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    }
    left_out = (OF_THE_MACHINE, NOT_NEEDED)
    return [one for name, one in named.items() if not any(pattern.fullmatch(name) for pattern in left_out)]


def unpack(wheels: Path, site: Path) -> list[str]:
    """Unpack what fits this Python and is newer than what it has; the names of what was unpacked.

    Args:
        wheels: A folder of wheels; it need not exist.
        site: Emptied first, unless it holds them already; to be put before the other folders that Python looks into.
    """
    fitting = sorted(
        (wheel for wheel in wheels.glob("*.whl") if _fits(wheel.name)), key=lambda one: _release(one.name)
    )
    newest = {_release(wheel.name)[0]: wheel for wheel in fitting}  # of several releases of a package
    used = [wheel for wheel in newest.values() if _is_news(wheel.name)]
    names, done = [" ".join(wheel.name.split("-")[:2]) for wheel in used], site / "unpacked.json"
    content = json.dumps([(wheel.name, wheel.stat().st_size) for wheel in used])
    if done.exists() and done.read_text() == content:
        return names
    shutil.rmtree(site, ignore_errors=True)
    for wheel in used:
        with zipfile.ZipFile(wheel) as archive:
            _unpack(archive, site)
    site.mkdir(parents=True, exist_ok=True)
    done.write_text(content)
    return names


def _unpack(archive: zipfile.ZipFile, site: Path) -> None:
    for member in archive.infolist():
        target = _place(member.filename)
        if target is None or member.is_dir():
            continue
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as source, (site / target).open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)


def _place(name: str) -> PurePosixPath | None:
    """Where a file of a wheel goes; None for scripts and headers, and for what would leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return None
    if path.parts[0].endswith(".data"):
        return PurePosixPath(*path.parts[2:]) if path.parts[1] in ("purelib", "platlib") else None
    return path


def _fits(name: str) -> bool:
    """Whether this Python on this machine can use a wheel, by its name."""
    pythons, abis, platforms = name.removesuffix(".whl").split("-")[-3:]
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    stable = "abi3" in abis.split(".") and any(_minor(tag) <= sys.version_info.minor for tag in pythons.split("."))
    pure = "none" in abis.split(".") and {"py3", mine} & set(pythons.split("."))
    right = platforms == "any" or any(
        tag.startswith(("manylinux", "linux")) and tag.endswith(f"_{platform.machine()}")
        for tag in platforms.split(".")
    )
    return right and bool(stable or pure or mine in abis.split("."))


def _minor(tag: str) -> int:
    found = re.fullmatch(r"cp3(\d+)", tag)
    return int(found[1]) if found else 1000


def _release(name: str) -> tuple[str, list[int]]:
    """Package and version of a wheel, by its name."""
    package, version_text = name.split("-")[:2]
    return package.lower(), _numbers(version_text)


def _is_news(name: str) -> bool:
    """Whether this Python lacks the package of a wheel, or has an older one."""
    package, new = _release(name)
    try:
        return _numbers(version(package)) < new
    except PackageNotFoundError:
        return True


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def fill(folder: Path, python_version: str, requirements: Sequence[str]) -> list[str]:
    """Download wheels for a machine of another Python version; pip and a network are needed. The files.

    Args:
        folder: Gets the wheels.
        python_version: Such as "3.12".
        requirements: Their own requirements come along, but for torch and CUDA's libraries.
    """
    for_it = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp"]
    for_it += [f"--platform=manylinux_{number}_{platform.machine()}" for number in PLATFORMS]
    for_it += [f"--platform=manylinux2014_{platform.machine()}", f"--platform=manylinux1_{platform.machine()}"]
    pip = [sys.executable, "-m", "pip"]
    report = folder / "resolved.json"
    folder.mkdir(parents=True, exist_ok=True)
    resolve = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", f"--target={folder / 'none'}"]
    subprocess.run([*resolve, f"--report={report}", *for_it, *requirements], check=True)
    pins = list(_pins(report))
    report.unlink()
    subprocess.run([*pip, "download", "--quiet", "--no-deps", f"--dest={folder}", *for_it, *pins], check=True)
    return sorted(path.name for path in folder.glob("*.whl"))


def _pins(report: Path) -> Iterator[str]:
    for one in json.loads(report.read_text())["install"]:
        name = one["metadata"]["name"]
        if not OF_THE_MACHINE.fullmatch(name.lower()):
            yield f"{name}=={one['metadata']['version']}"
