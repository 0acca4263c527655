"""Examples as people launch them, and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hf_parallel.settings.recipes import find_recipe


ROOT = Path(__file__).resolve().parents[1]


def launch(example: str, folder: Path, *options: str, recipe: str | None = "cpu_pp2") -> str:
    """What the demo of an example prints, under `accelerate launch` or in one process."""
    command = [sys.executable]
    if recipe is not None:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(find_recipe(recipe))]
    script = [str(ROOT / "examples" / f"{example}.py"), "--demo", "--output_dir", str(folder / "out"), *options]
    return run([*command, *script], folder)


def run(command: list[str], folder: Path) -> str:
    """What a command prints that ends well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def first_and_last(printed: str, what: str = "train loss") -> tuple[float, float]:
    """Of the first line that says so."""
    first, last = re.findall(rf"{what} (-?[\d.]+) -> (-?[\d.]+)", printed)[0]
    return float(first), float(last)
