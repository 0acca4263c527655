"""Real launches in which one rank stops, or every rank just ends: the job is down at once, and no finished one aborts.

If a test fails here, a job that hangs holds its machines until a launcher's grace is over, or one that trained to its end is
reported as failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch.test_launch_failures import Job


pytestmark = [pytest.mark.long, pytest.mark.launch]

SCRIPT = """
import os, signal, sys, time
from transformers import Trainer, TrainingArguments
import tiny
from hf_parallel import HFParallelCallback

what, rank, calls = sys.argv[1], int(os.environ["RANK"]), []
open(f"pid{rank}", "w").write(str(os.getpid()))
if what == "handled":  # as jobs do that save when a cluster takes their machine
    signal.signal(signal.SIGTERM, lambda *args: None)

def collate(features):
    calls.append(1)
    if rank == 1 and len(calls) == 3 and what in ("stop", "handled"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and len(calls) == 3 and what == "sleep":
        time.sleep(120)
    return tiny.collate(features)

args = TrainingArguments("out", per_device_train_batch_size=8, max_steps=4, save_strategy="no", report_to=[], disable_tqdm=True)
trainer = Trainer(tiny.llama(), args, train_dataset=tiny.rows(64), data_collator=collate, callbacks=[HFParallelCallback()])
trainer.train()
print("trained", flush=True)
"""
SECTION = "{pp_size: 2, pipeline: {num_microbatches: 4}, monitor: {hang_timeout_s: 3}}"
DP = "{monitor: {hang_timeout_s: 3}}"
# Below the half minute that launchers give stopped processes, and above what a busy machine needs to end others.
BELOW_THE_GRACE_S = 20


@pytest.mark.parametrize(
    ("what", "section"),
    [
        ("stop", SECTION),
        pytest.param("handled", DP, marks=pytest.mark.slow),
        pytest.param("sleep", DP, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_does_not_hold_the_job(what: str, section: str, tmp_path: Path) -> None:
    job = Job(tmp_path, what, section, script=SCRIPT)
    deadline = time.monotonic() + 90
    while "gave up" not in job.stderr():
        assert job.process.poll() is None, job.stderr()[-3000:]
        assert time.monotonic() < deadline, job.stderr()[-3000:]
        time.sleep(0.1)
    stderr = job.end(BELOW_THE_GRACE_S)
    assert job.process.returncode != 0
    assert re.search(r"The job waits for: rank 1 \((pp|dp) 1 of 2\)\.", stderr), stderr[-3000:]
    assert what == "sleep" or "silent (stopped); last seen" in stderr
    for rank in range(2):
        assert not psutil.pid_exists(int((tmp_path / f"pid{rank}").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_run_that_ended_well_aborts(tmp_path: Path) -> None:
    """Scripts that end right after training; the watchdogs write several heartbeats a second."""
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        job = Job(
            folder, "end", [SECTION, DP][attempt % 2].replace("3}", "0.2}") if attempt % 3 else SECTION, script=SCRIPT
        )
        stderr = job.end(120)
        assert job.process.returncode == 0, (attempt, stderr[-3000:])
        assert (folder / "stdout.txt").read_text().count("trained") == 2
        assert "terminate called" not in stderr
        assert "Fatal Python error" not in stderr


# -- a network that is cut ---------------------------------------------------------------------------------------------

MACHINE = """
import os, sys, time
from transformers import Trainer, TrainingArguments
import tiny
from hf_parallel import HFParallelCallback

class Slow(HFParallelCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.1)
        if state.global_step == 5:
            open(f"ready{os.environ['RANK']}", "w").close()

args = TrainingArguments("out", per_device_train_batch_size=8, max_steps=2000, save_strategy="no", report_to=[], disable_tqdm=True)
callback = Slow({"pp_size": 2, "monitor": {"hang_timeout_s": 4}})
Trainer(tiny.llama(), args, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=[callback]).train()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cable() -> object:
    """Two machines, a and b, and a cable between them."""
    try:
        for name in ("hfpa", "hfpb"):
            ip("netns", "add", name)
        ip("link", "add", "hfpa0", "netns", "hfpa", "type", "veth", "peer", "name", "hfpb0", "netns", "hfpb")
        for name, address in (("hfpa", "10.77.0.1/24"), ("hfpb", "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", f"{name}0")
            ip("-n", name, "link", "set", f"{name}0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["ip", "netns", "del", "hfpa"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", "hfpb"], check=False, capture_output=True)
        pytest.skip(f"no network namespaces here: {error}")
    yield lambda: ip("-n", "hfpb", "link", "set", "hfpb0", "down")
    for name in ("hfpa", "hfpb"):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_both_machines_end_by_themselves_when_their_network_is_cut(cable: object, tmp_path: Path) -> None:
    import os

    (tmp_path / "train.py").write_text(MACHINE)
    root = Path(__file__).resolve().parents[2]
    processes = []
    for rank, name in enumerate(("hfpa", "hfpb")):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29533", "GLOO_SOCKET_IFNAME": f"{name}0"}
        env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, [root, root / "tests"]))}
        with open(tmp_path / f"err{rank}", "w") as stderr:
            command = ["ip", "netns", "exec", name, sys.executable, "train.py"]
            processes.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=stderr, stderr=stderr))
    errors = [tmp_path / f"err{rank}" for rank in range(2)]
    try:
        deadline = time.monotonic() + 240
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            assert all(process.poll() is None for process in processes), [file.read_text()[-2000:] for file in errors]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cable()  # type: ignore[operator]
        began = time.monotonic()
        codes = [process.wait(30) for process in processes]
        print("ended after", round(time.monotonic() - began, 1), "s")
    finally:
        for process in processes:
            process.kill()
    assert codes == [86, 86], [file.read_text()[-2000:] for file in errors]
    far = errors[1].read_text()
    assert "gave up: " in far
    assert re.search(r"The store of the job on 10\.77\.0\.1 has not answered for .* the network to it is cut", far), (
        far
    )
    assert "rank 1 (pp 1 of 2) gave up" in far
    assert "The job waits for: rank 1 (pp 1 of 2)" in errors[0].read_text()
