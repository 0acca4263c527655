"""A rank resolves its settings once: whatever it needs of them later is handed down to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_parallel.settings.recipes import find_recipe


pytestmark = [pytest.mark.launch, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
# Counts by name from before our first import, so that nothing of ours has to be replaced; with the imports of transformers, a
# count would take most of a minute.
COUNT = """
import collections, json, os, sys
import accelerate, transformers.trainer
assert not any(name.startswith("hf_parallel.") for name in sys.modules)
found = collections.Counter()
NAMES = {"Process.parents", "HFParallelConfig.__init__", "ScheduleChoice.__init__"}

def count(frame, event, argument):
    if event == "call" and frame.f_code.co_qualname in NAMES:
        found[frame.f_code.co_qualname] += 1

def opened(event, arguments):
    if event == "open" and str(arguments[0]).endswith("cpu_pp2.yaml"):
        found["cpu_pp2.yaml"] += 1

sys.addaudithook(opened)
sys.setprofile(count)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
from hf_parallel import HFParallelCallback
import tiny
args = TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
    dataloader_pin_memory=False,
)
trainer = Trainer(
    tiny.llama(), args, train_dataset=tiny.rows(16), data_collator=tiny.collate, callbacks=[HFParallelCallback()]
)
trainer.train()
"""
LOOP = """
from accelerate import Accelerator
from hf_parallel import HFParallelPlugin
import tiny
accelerator = Accelerator(parallelism_config=HFParallelPlugin())
model = accelerator.prepare(tiny.llama())
"""
LOADED = f"""
import hf_parallel, tiny
tiny.llama().save_pretrained("model" + os.environ["RANK"])
model = hf_parallel.from_pretrained("model" + os.environ["RANK"])
{LOOP}
"""
TELL = """
sys.setprofile(None)
open("found" + os.environ["RANK"] + ".json", "w").write(json.dumps(found))
"""


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(TRAINER, id="trainer"),
        pytest.param(LOOP, id="loop", marks=SLOW),
        pytest.param(LOADED, id="loaded", marks=SLOW),
    ],
)
def test_a_rank_resolves_its_settings_once(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNT + script + TELL)
    command = ["-m", "accelerate.commands.launch", "--config_file", str(find_recipe("cpu_pp2")), "train.py"]
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found == {
            "Process.parents": 1,
            "cpu_pp2.yaml": 1,
            "HFParallelConfig.__init__": 1,
            "ScheduleChoice.__init__": 1,
        }
