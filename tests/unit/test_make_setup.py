"""`make setup` in an activated environment takes that environment's torch, and downloads none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_torch_of_the_active_environment_is_used(tmp_path: Path) -> None:
    """A venv made by a venv sees the base interpreter's packages, not those of the venv that made it."""
    active, copy = tmp_path / "active", tmp_path / "checkout"
    venv.create(active, with_pip=False, symlinks=True)
    site = active / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "torch.py").write_text("mine = True\n")
    copy.mkdir()
    shutil.copy(ROOT / "Makefile", copy)
    env = {**os.environ, "VIRTUAL_ENV": str(active)}
    for name in ("PYTHON", "PYTHONPATH", "CONDA_PREFIX", "MAKEFLAGS"):
        env.pop(name, None)

    def made(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-o", "pyproject.toml", "-o", "setup.py", *arguments]
        return subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    (copy / "pyproject.toml").touch()
    (copy / "setup.py").touch()
    recipe = made("-n", "setup").partition("fi\n")[0] + "fi\n"  # without the installs, which use the network
    recipe = recipe.replace("-m venv ", "-m venv --without-pip ")
    subprocess.run(["bash", "-ec", recipe], cwd=copy, env=env, check=True, timeout=60)
    found = subprocess.run(
        [copy / ".venv" / "bin" / "python", "-c", "import torch; print(torch.mine)"],
        **{"env": env, "capture_output": True, "text": True, "check": True},
    )
    assert found.stdout == "True\n"
