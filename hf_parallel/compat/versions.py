"""The releases of other packages that this one works with, as pyproject.toml names them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from hf_parallel.errors import UnsupportedError


SUPPORTED = {"torch": ">=2.11", "transformers": ">=5.22,<5.25", "accelerate": ">=1.14,<2"}


def wanted(package: str) -> str:
    """Requirement to install, such as "transformers>=5.22,<5.25"."""
    return f"{package}{SUPPORTED[package]}"


def refuse_old_packages(version_of: Callable[[str], str] = version) -> None:
    """Refuse releases below the floors, which lack what is imported and would fail somewhere, by another name.

    Args:
        version_of: The version of an installed package.

    Raises:
        UnsupportedError: Each package that is too old, with its version and what to install.
    """
    old = []
    for package, supported in SUPPORTED.items():
        try:
            found = version_of(package)
        except PackageNotFoundError:
            continue  # its import says so
        floor = supported.partition(",")[0].removeprefix(">=")
        if Version(found).release < Version(floor).release:  # a candidate of the floor has what is imported
            old.append(f"hf_parallel needs {package} >= {floor}, found {found}: pip install '{wanted(package)}'.")
    if old:
        raise UnsupportedError("\n".join(old))
