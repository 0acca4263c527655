"""Real launches that fail: the whole job ends by itself, says which rank did it, and leaves only complete checkpoints.

If a test fails here, a job on a cluster hangs until its time limit, dies without a cause, or loses a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest


pytestmark = [pytest.mark.long, pytest.mark.launch]

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "mine.yaml")
RECIPE = """
distributed_type: {kind}
num_processes: 2
main_process_port: 0
use_cpu: true
parallelism_config:
  hf_parallel: {section}
"""
SECTION = "{pp_size: 2, pipeline: {num_microbatches: 4}, monitor: {hang_timeout_s: 5}}"
SCRIPT = """
import os, signal, sys, time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
import tiny
from hf_parallel import HFParallelCallback

what, rank, calls = sys.argv[1], int(os.environ["RANK"]), []

def collate(features):
    calls.append(1)
    if rank == 1 and len(calls) == 4 and what == "raise":
        raise ValueError("a bad row")
    if rank == 1 and len(calls) == 4 and what == "die":
        os._exit(9)
    if rank == 1 and len(calls) == 4 and what == "hang":
        time.sleep(120)
    return tiny.collate(features)

args = TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=6, save_steps=2, logging_steps=1, report_to=[], disable_tqdm=True,
    save_strategy="steps" if what in ("kill", "resume") else "no", dataloader_pin_memory=False,
)
trainer = Trainer(tiny.llama(), args, train_dataset=tiny.rows(64), data_collator=collate, callbacks=[HFParallelCallback()])
if what == "kill" and rank == 0:
    import hf_parallel.trainer.checkpoints as saving
    publish = saving.publish
    def kill_at_the_second(staged, final):
        if final.name == "checkpoint-4":  # everything is written, nothing is renamed
            open("ready", "w").close()
            time.sleep(120)
        publish(staged, final)
    saving.publish = kill_at_the_second
trainer.train(resume_from_checkpoint=what == "resume")
print("steps", trainer.state.global_step, "loss", trainer.state.log_history[-2]["loss"])
"""


class Job:
    """A launched job in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        what: str,
        section: str = SECTION,
        kind: str = "MULTI_GPU",
        script: str = SCRIPT,
        command: Sequence[str] = LAUNCH,
    ) -> None:
        (folder / "train.py").write_text(script)
        (folder / "mine.yaml").write_text(RECIPE.format(kind=kind, section=section))
        self.folder = folder
        self.start([*command, "train.py", what])

    def start(self, command: list[str]) -> None:
        path = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
        with open(self.folder / "stderr.txt", "w") as stderr, open(self.folder / "stdout.txt", "w") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def end(self, timeout: float = 90.0) -> str:
        """Wait for the job to end by itself; what it wrote to stderr."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the job was still running after {timeout:g} s:\n{self.stderr()[-3000:]}")
        return self.stderr()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()


@pytest.mark.parametrize("what", ["raise", "die", "hang"])
def test_a_failing_rank_ends_the_job_and_is_named(what: str, tmp_path: Path) -> None:
    # The launcher ends the other rank as soon as it looks: it looks late, so that this one has said what it saw.
    job = Job(tmp_path, what, command=(*LAUNCH, "--monitor_interval", "4") if what == "die" else LAUNCH)
    stderr = job.end()
    assert job.process.returncode != 0
    if what == "raise":
        assert "hf_parallel: rank 1 (pp 1 of 2) failed: ValueError: a bad row" in stderr
    elif what == "die":
        assert re.search(r"rank\s*: 1 .*\n.*exitcode\s*: 9", stderr)
        assert "rank 0 (pp 0 of 2) lost rank 1 (pp 1 of 2), which has ended with exit code 9" in stderr
    else:
        assert "The job waits for: rank 1 (pp 1 of 2)." in stderr
        assert "held up by rank 1 (pp 1 of 2), which is in the data loader since" in stderr
        assert re.search(r"\(stack: collate at [^ ]*train\.py:\d+ < ", stderr)


def test_a_job_killed_while_it_saves_leaves_complete_checkpoints_and_resumes(tmp_path: Path) -> None:
    job = Job(tmp_path, "kill")
    deadline = time.monotonic() + 90
    while not (tmp_path / "ready").exists():
        assert job.process.poll() is None, job.stderr()[-3000:]
        assert time.monotonic() < deadline, job.stderr()[-3000:]
        time.sleep(0.1)
    workers = children_of(job.process.pid)
    job.kill()
    for pid in workers:  # the launcher gives its workers sessions of their own
        os.kill(pid, signal.SIGKILL)
    out = tmp_path / "out"
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2

    resumed = Job(tmp_path, "resume")
    stderr = resumed.end()
    assert resumed.process.returncode == 0, stderr[-3000:]
    assert "steps 6" in (tmp_path / "stdout.txt").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.mark.parametrize(
    ("section", "kind", "message"),
    [
        ("{pp_szie: 2}", "MULTI_GPU", r"pp_szie: unknown key\. Did you mean pp_size\?"),
        pytest.param(
            "{pp_size: 2}",
            "MULTI_CPU",
            r"distributed_type='MULTI_CPU': .*ONE process.*Set distributed_type to MULTI_GPU",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["misspelled_key", "multi_cpu"],
)
def test_a_bad_file_ends_the_job_before_any_process_group(
    section: str, kind: str, message: str, tmp_path: Path
) -> None:
    script = """
import atexit, os
def note():
    import torch.distributed as dist
    open(f"rank{os.environ.get('RANK', 0)}.txt", "w").write(str(dist.is_initialized()))
atexit.register(note)
import hf_parallel
hf_parallel.HFParallelCallback()
open("got_past_it", "w").close()
"""
    job = Job(tmp_path, "none", section, kind, script)
    stderr = job.end()
    assert job.process.returncode != 0
    assert re.search(rf"ConfigError: .*mine\.yaml(.|\n)*{message}", stderr), stderr[-3000:]
    assert not (tmp_path / "got_past_it").exists()
    noted = [path.read_text() for path in tmp_path.glob("rank*.txt")]
    assert noted
    assert set(noted) == {"False"}


def test_torchrun_without_settings_says_where_to_give_them(tmp_path: Path) -> None:
    job = Job(tmp_path, "none", command=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    stderr = job.end()
    assert job.process.returncode != 0
    assert re.search(r"ConfigError: WORLD_SIZE=2 and no settings: .*accelerate launch --config_file FILE", stderr)
