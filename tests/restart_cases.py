"""Launched jobs of which a rank is killed and that their launcher starts again, for the tests and for `make restart-test`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hf_parallel.checkpoints.memory import memory_folder


ROOT = Path(__file__).resolve().parents[1]
STEPS = 12
# A step has 8 rows with any number of replicas.
SCRIPT = """
import json, os, signal, sys, time
import psutil
import tiny
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_parallel import HFParallelCallback

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kills = [kill for kill in json.loads(os.environ["KILLS"]) if kill["attempt"] == attempt and kill["rank"] == rank]
steps, save_steps = int(os.environ["STEPS"]), int(os.environ["SAVE_STEPS"])

def note(**entry):
    with open("diary.jsonl", "a") as file:
        file.write(json.dumps({"at": time.time(), "attempt": attempt, "rank": rank, **entry}) + "\\n")

note(started=psutil.Process().create_time(), imported=True)

def strike():
    note(killed=True, launcher=os.getppid())
    os.kill(os.getpid(), signal.SIGKILL)

class Diary(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        note(trains=True)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for kill in kills:
            if state.global_step == kill["step"] and kill["where"] == "begin":
                strike()
            if state.global_step == kill["step"] and kill["where"] == "forward":
                for name, module in model.named_modules():  # those of other stages never run
                    if name.endswith("mlp"):
                        module.register_forward_hook(lambda *args: strike())

    def on_step_end(self, args, state, control, **kwargs):
        note(ended=state.global_step, world=int(os.environ["WORLD_SIZE"]))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if rank == 0 and logs and "loss" in logs:
            note(step=state.global_step, loss=logs["loss"], norm=logs["grad_norm"])

for kill in kills:
    if kill["where"] == "snapshot":  # when every file is written and the folder has no name yet
        import hf_parallel.trainer.checkpoints as saving
        publish = saving.publish
        saving.publish = lambda staged, final, publish=publish, kill=kill: (
            strike() if final.name == f"checkpoint-{kill['step']}" else publish(staged, final))

args = TrainingArguments(
    "out", per_device_train_batch_size=int(os.environ["ROWS"]), max_steps=steps, logging_steps=1, report_to=[], disable_tqdm=True,
    save_strategy="steps" if save_steps else "no", save_steps=save_steps or 1, learning_rate=1e-3, lr_scheduler_type="cosine",
    max_grad_norm=0.5, adam_epsilon=1e-5, dataloader_pin_memory=False)
trainer = Trainer(tiny.MODELS[os.environ["MODEL"]](), args, train_dataset=tiny.rows(80), data_collator=tiny.collate,
                  callbacks=[Diary(), HFParallelCallback()])
trainer.train()
note(finished=trainer.state.global_step)
"""
RECIPE = """
distributed_type: MULTI_GPU
num_processes: {processes}
main_process_port: 0
use_cpu: true
parallelism_config:
  hf_parallel: {section}
"""


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that a rank gives itself.

    Args:
        rank: Which.
        step: Number of steps that are done, or of the snapshot.
        where: At the begin of a step, in a forward pass, or before a snapshot gets its name.
        attempt: In which start of the processes, from 0.
    """

    rank: int
    step: int
    where: str = "begin"
    attempt: int = 0


@dataclass
class RestartJob:
    """A launched job.

    Args:
        folder: Where it runs.
        section: The settings.
        kills: What happens to it.
        processes: Ranks.
        save_steps: Between checkpoints on disk; 0 for none.
        rows: Of a batch of one replica.
        restarts: How often the launcher starts processes again.
        model: Of `tiny.MODELS`.
    """

    folder: Path
    section: dict[str, Any] = field(default_factory=dict)
    kills: Sequence[Kill] = ()
    processes: int = 4
    save_steps: int = 4
    rows: int = 4
    restarts: int = 3
    model: str = "llama"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "train.py").write_text(SCRIPT)
        (self.folder / "mine.yaml").write_text(
            RECIPE.format(processes=self.processes, section=json.dumps(self.section))
        )

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
        plain = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        kills = json.dumps([vars(kill) for kill in self.kills])
        own = {"KILLS": kills, "STEPS": str(STEPS), "SAVE_STEPS": str(self.save_steps), "ROWS": str(self.rows)}
        own["MODEL"] = self.model
        return os.environ | plain | own

    def launch(self, command: Sequence[str] = (), name: str = "log") -> subprocess.Popen[bytes]:
        """Start the launcher; by default accelerate's, with restarts."""
        launcher = ("-m", "accelerate.commands.launch", "--config_file", "mine.yaml")
        chosen = command or (*launcher, "--max_restarts", str(self.restarts))
        with open(self.folder / f"{name}.txt", "w") as log:
            return subprocess.Popen(
                [sys.executable, *chosen, "train.py"],
                cwd=self.folder,
                env=self.environment() | {"HF_PARALLEL_CONFIG": "mine.yaml"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, timeout: float = 240.0) -> int:
        """Launch and wait; the exit code."""
        process = self.launch()
        try:
            return process.wait(timeout)
        finally:
            end_tree(process)

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    @property
    def diary(self) -> list[dict[str, Any]]:
        path = self.folder / "diary.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> list[tuple[int, int, float, float]]:
        """(attempt, step, loss, norm) of every step that any attempt logged."""
        return [(e["attempt"], e["step"], e["loss"], e["norm"]) for e in self.diary if "step" in e]

    @property
    def memory(self) -> Path:
        return memory_folder(self.folder / "out")

    def seconds_until_training(self) -> list[float]:
        """From each kill until a later attempt has done a step."""
        kills = [(entry["at"], entry["attempt"]) for entry in self.diary if "killed" in entry]
        ends = [(entry["at"], entry["attempt"]) for entry in self.diary if "ended" in entry]
        return [round(min(t for t, later in ends if later > attempt) - at, 1) for at, attempt in kills]

    def phases(self) -> list[dict[str, float]]:
        """What the seconds from each kill until a later attempt has done a step went to, of the slowest rank each."""
        found = []
        for kill in (entry for entry in self.diary if "killed" in entry):
            own = [entry for entry in self.diary if entry["attempt"] == kill["attempt"] + 1]
            started = max(entry["started"] for entry in own if "started" in entry)
            imported, trains = (max(e["at"] for e in own if key in e) for key in ("imported", "trains"))
            first = min(entry["at"] for entry in own if "ended" in entry)
            moments = {"start": started, "import": imported, "set up": trains, "step": first}
            before = kill["at"]
            phases = {}
            for name, moment in moments.items():
                phases[name], before = round(moment - before, 1), moment
            found.append(phases)
        return found

    def first_step(self, attempt: int) -> int | None:
        """Of the steps that an attempt did, the first; None if it did none."""
        return min((step for each, step, _, _ in self.steps if each == attempt), default=None)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a launcher and its workers."""
    if process.poll() is not None:
        return
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.send_signal(signal.SIGKILL)
    process.wait()


def differences(job: RestartJob, straight: RestartJob, tolerance: float = 1e-5) -> list[str]:
    """Steps whose loss or norm is not that of the uninterrupted run, and steps that nobody did."""
    expected = {step: (loss, norm) for _, step, loss, norm in straight.steps}
    found = []
    for attempt, step, loss, norm in job.steps:
        for name, here, there in (("loss", loss, expected[step][0]), ("norm", norm, expected[step][1])):
            if abs(here - there) > tolerance * abs(there):
                found.append(f"attempt {attempt}, step {step}: {name} {here}, without kills {there}")
    missing = set(range(1, STEPS + 1)) - {step for _, step, _, _ in job.steps}
    return found + [f"step {step} was never done" for step in sorted(missing)]


def wait_for(condition: Any, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
