"""The LoRA example as people launch it: two stages, and the folder that PEFT loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_parallel.settings.recipes import find_recipe


pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_learns_and_exports_an_adapter(tmp_path: Path) -> None:
    from peft import PeftConfig
    from safetensors.torch import load_file

    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(find_recipe("cpu_pp2"))]
    script = [str(ROOT / "examples" / "finetune_lora.py"), "--demo", "--output_dir", str(tmp_path / "adapter")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [*launch, *script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    first, last = map(float, re.findall(r"train loss ([\d.]+) -> ([\d.]+)", result.stdout)[0])
    assert last < first - 0.1
    assert PeftConfig.from_pretrained(str(tmp_path / "adapter")).peft_type == "LORA"
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 4 * 7 * 2  # blocks, linear layers, A and B
