"""`layout: auto` plans on every rank alike, keeps the rows of an optimizer step, and trains as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from rank_runner import run_ranks
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback


ENV = {"ACCELERATE_USE_CPU": "true"}
ROOT = Path(__file__).resolve().parents[2]
STEPS, ROWS, ACCUMULATION = 3, 4, 2


def trained(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Losses of a run whose layout is planned, or of one process, and what was planned."""
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS if world_size > 1 else 2 * ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    callback = HFParallelCallback("auto") if world_size > 1 else None
    trainer = Trainer(
        tiny.llama(),
        args,
        train_dataset=tiny.rows(64),
        data_collator=tiny.collate,
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    found: dict[str, Any] = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rows": trainer.get_total_train_batch_size(args) * args.gradient_accumulation_steps
        if world_size == 1
        else trainer.get_total_train_batch_size(args),
    }
    if callback is not None and callback.session is not None:
        found["section"], found["words"] = callback.config.to_yaml_section(), callback.explanation
        found["layout"] = callback.config.layout
        callback.session.watchdog.stop()
    return found


def test_a_planned_run_equals_one_process(tmp_path: Path) -> None:
    planned = run_ranks(trained, 2, str(tmp_path), tmp_path=tmp_path, env=ENV, timeout=200)
    (alone,) = run_ranks(trained, 1, str(tmp_path), tmp_path=tmp_path, env=ENV, init_group=False)
    assert planned[0]["section"] == planned[1]["section"]
    assert planned[0]["words"] == planned[1]["words"]
    assert planned[0]["layout"] == "given"
    assert planned[0]["rows"] == 2 * ROWS * ACCUMULATION
    assert "Runner-up" in planned[0]["words"]
    assert "1 x 2 cpu" in planned[0]["words"]
    assert planned[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


SCRIPT = """
import json, os
from transformers import Trainer, TrainingArguments
from hf_parallel import HFParallelCallback
import tiny
args = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=2, logging_steps=1, report_to=[], disable_tqdm=True,
    save_strategy="no", dataloader_pin_memory=False,
)
callback = HFParallelCallback()
trainer = Trainer(
    tiny.llama(), args, train_dataset=tiny.rows(16), data_collator=tiny.collate, callbacks=[callback]
)
trainer.train()
found = {"words": callback.explanation, "steps": trainer.state.global_step}
open("found" + os.environ["RANK"] + ".json", "w").write(json.dumps(found))
"""


@pytest.mark.launch
@pytest.mark.long
def test_a_file_that_says_auto_is_planned_by_its_launch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "auto.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
        "parallelism_config:\n  hf_parallel: auto\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "auto.yaml", "train.py"],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["steps"] == 2
    assert found[0]["words"].startswith("layout=auto: tp ")
    assert found[0]["words"] in result.stderr + result.stdout
