"""`accelerate launch` with DeepSpeed in our section: the script imports hf_parallel and nothing else, the file says the rest."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.launch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
distributed_type: {kind}
num_processes: {processes}
main_process_port: 0
mixed_precision: {precision}
use_cpu: true
parallelism_config:
  hf_parallel:
    gradient_accumulation_steps: 2
    zero: {{engine: deepspeed, stage: {stage}}}
"""
SCRIPT = """
import json, os, sys
import tiny
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from hf_parallel import HFParallelCallback

args = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    max_grad_norm=0.3, learning_rate=3e-3, **json.loads(sys.argv[1]),
)
model = AutoModelForCausalLM.from_pretrained("start")
partitioned = all(hasattr(p, "ds_numel") for p in model.parameters())
trainer = Trainer(model, args, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=[HFParallelCallback()])
trainer.train()
trainer.save_model("final")
engine = trainer.model_wrapped
if args.process_index == 0:
    facts = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "stage": engine.zero_optimization_stage(),
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "bf16": engine.bfloat16_enabled(),
        "partitioned": partitioned,
        "world": args.world_size,
    }
    open("facts.json", "w").write(json.dumps(facts))
"""


def launch(
    folder: Path, arguments: dict[str, object] | None = None, env: dict[str, str] | None = None, **recipe: object
) -> tuple[int, str]:
    import tiny

    tiny.llama().save_pretrained(folder / "start")
    filled = {"kind": "MULTI_GPU", "processes": 2, "precision": "'no'", "stage": 2} | recipe
    (folder / "mine.yaml").write_text(RECIPE.format(**filled))
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "mine.yaml", "train.py"]
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
    done = subprocess.run(
        [*command, json.dumps(arguments or {})],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stderr


def test_the_file_alone_decides_stage_precision_and_accumulation(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, stage=3, precision="bf16")
    assert code == 0, stderr[-3000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    losses = facts.pop("losses")
    assert losses[0] > losses[-1]
    assert facts == {
        "stage": 3, "accumulation": 2, "clipping": 0.3, "bf16": True, "partitioned": True, "world": 2
    }  # fmt: skip
    assert stderr.count("hf_parallel: DeepSpeed ZeRO-3 over 2 processes, from ") == 1
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "final")


def test_deepspeeds_own_launcher_starts_one_process_too(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, kind="DEEPSPEED", processes=1, precision="bf16")
    assert code == 0, stderr[-3000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["stage"], facts["accumulation"], facts["world"], facts["bf16"]) == (2, 2, 1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "TrainingArguments(deepspeed=...) beside zero.engine=deepspeed"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=2 with TrainingArguments(gradient_accumulation_steps=4)"),
    ],
)  # fmt: skip
def test_a_second_truth_in_the_script_is_refused(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, arguments)
    assert code != 0
    assert message in stderr


def test_the_lock_of_a_killed_build_ends_the_launch(tmp_path: Path) -> None:
    lock = tmp_path / "ops" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    code, stderr = launch(tmp_path, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")})
    assert code != 0
    assert f"If no build is running: rm {lock}" in stderr
