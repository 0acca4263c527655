"""Two machines with host names of their own train, resume and fail as one would.

If a test fails here, a run on a cluster waits for ever without a word, or trains something else than one process does.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from two_machines import ADDRESSES, HOSTS, Machines, need_namespaces


pytestmark = [pytest.mark.slow, pytest.mark.launch, pytest.mark.timeout(300)]

RECIPE = """
distributed_type: MULTI_GPU
num_machines: 2
num_processes: {processes}
main_process_ip: {address}
main_process_port: 29500
use_cpu: true
parallelism_config:
  hf_parallel: {section}
"""
SCRIPT = """
import json, os, sys, time
import tiny
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_parallel import HFParallelCallback

rows, steps, resume, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume", sys.argv[4]
rank = int(os.environ["RANK"])

class Ready(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            open(f"ready{rank}", "w").close()
        if state.global_step >= 4 and what == "until cut":
            time.sleep(0.1)

args = TrainingArguments(
    "out", per_device_train_batch_size=rows, max_steps=steps, save_strategy="steps" if what == "save" else "no", save_steps=3,
    logging_steps=1, report_to=[], disable_tqdm=True, seed=3, save_total_limit=2,
)
trainer = Trainer(
    tiny.llama(), args, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=[HFParallelCallback(), Ready()]
)
trainer.train(resume_from_checkpoint=resume)
trainer.save_model("final")
print("trained", rank, trainer.state.global_step, os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
"""
LAYOUTS = {
    "a stage": (2, "{pp_size: 2, pipeline: {num_microbatches: 4}}", 8),
    "a replica": (2, "{}", 4),
    "tp x dp": (4, "{tp_size: 2}", 4),
    "ZeRO 3": (2, "{zero: {stage: 3}}", 4),
}


class Run:
    """A training run on both machines.

    Args:
        machines: They.
        layout: A key of `LAYOUTS`.
        launcher: "accelerate" or "torchrun".
        address: Of machine 0, as its file says it.
    """

    def __init__(
        self, machines: Machines, layout: str, launcher: str = "accelerate", address: str = ADDRESSES[0]
    ) -> None:
        self.machines, self.launcher, self.address = machines, launcher, address
        self.processes, section, self.rows = LAYOUTS[layout]
        self.section = section[:-1] + (", " if section != "{}" else "") + "monitor: {hang_timeout_s: 8}}"
        self.running: list[subprocess.Popen[bytes]] = []
        for disk in set(machines.disks):
            (disk / "train.py").write_text(SCRIPT)
            recipe = RECIPE.format(processes=self.processes, address=address, section=self.section)
            (disk / "mine.yaml").write_text(recipe)

    def start(self, index: int, steps: int = 3, start: str = "anew", what: str = "train", **variables: str) -> None:
        script = ["train.py", str(self.rows), str(steps), start, what]
        if self.launcher == "accelerate":
            options = ["accelerate.commands.launch", "--config_file", "mine.yaml", "--machine_rank", str(index)]
        else:
            options = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(index)]
            options += ["--nproc-per-node", str(self.processes // 2), "--master-addr", self.address]
            options += ["--master-port", "29500"]
            variables |= {"HF_PARALLEL_CONFIG": "mine.yaml"}
        self.running.append(self.machines.start(index, ["-m", *options, *script], **variables))

    def end(self, seconds: float = 120) -> list[int]:
        """Exit codes of what was started."""
        try:
            return [process.wait(seconds) for process in self.running]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.outputs()) from None

    def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.05)

    def outputs(self) -> str:
        return "\n".join(f"--- {HOSTS[index]}\n{self.machines.output(index)[-4000:]}" for index in range(2))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    need_namespaces()
    made: list[Machines] = []

    def make(**options: Any) -> Machines:
        made.append(Machines(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def one_process(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """What one process trains of the same rows."""
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True,
        seed=3, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(tiny.llama(), args, train_dataset=tiny.rows(64), data_collator=tiny.collate)
    trainer.train()
    return {name: tensor.detach() for name, tensor in trainer.model.state_dict().items()}


def assert_same(final: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(final / "model.safetensors")
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("layout", "launcher", "resolves_to"),
    [
        ("a stage", "accelerate", "loopback"),
        ("a replica", "torchrun", "docker"),
        ("tp x dp", "accelerate", "nothing"),
        ("ZeRO 3", "accelerate", "card"),
        ("a stage", "torchrun", "nothing"),
    ],
)
def test_two_machines_train_what_one_process_does(
    layout: str, launcher: str, resolves_to: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    run = Run(machines(resolves_to=resolves_to), layout, launcher)
    for index in range(2):
        run.start(index)
    assert run.end() == [0, 0], run.outputs()
    assert_same(run.machines.work / "final", one_process(tmp_path / "one", 3))


@pytest.mark.parametrize("own_disk", [False, True])
def test_a_run_is_resumed_from_folders_that_are_shared_or_not(
    own_disk: bool, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    run = Run(machines(own_disk=own_disk), "a stage")
    for index in range(2):
        run.start(index, 3, "anew", "save")
    assert run.end() == [0, 0], run.outputs()
    for index in range(2):
        run.start(index, 6, "resume", "save")
    assert run.end() == [0, 0, 0, 0], run.outputs()
    assert_same(run.machines.disks[0] / "final", one_process(tmp_path / "one", 6))


def test_a_machine_that_starts_late_is_waited_for(machines: Callable[..., Machines], tmp_path: Path) -> None:
    run = Run(machines(), "a replica")
    run.start(0)
    run.until(lambda: len(listeners(run.machines)) > 0)  # the first machine waits
    time.sleep(10)  # longer than its wait for a heartbeat
    run.start(1)
    assert run.end() == [0, 0], run.outputs()
    assert_same(run.machines.work / "final", one_process(tmp_path / "one", 3))


def listeners(machines: Machines) -> str:
    return machines.sh(0, "ss -Hltn 'sport = 29500'")


def test_training_over_a_cable_of_20_ms_is_what_one_process_does(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    run = Run(machines(delay_s=0.01, resolves_to="loopback"), "a stage")
    for index in range(2):
        run.start(index)
    assert run.end() == [0, 0], run.outputs()
    assert_same(run.machines.work / "final", one_process(tmp_path / "one", 3))


@pytest.mark.parametrize("layout", ["a stage", "a replica"])
@pytest.mark.parametrize("lost", ["cut", "killed"])
def test_both_machines_say_who_is_lost_and_end(layout: str, lost: str, machines: Callable[..., Machines]) -> None:
    run = Run(machines(), layout)
    for index in range(2):
        run.start(index, 2000, "anew", "until cut")
    run.until(lambda: all((run.machines.work / f"ready{rank}").exists() for rank in range(2)))
    if lost == "cut":
        run.machines.cut()
    else:
        run.machines.kill(1)
    assert all(code not in (0, None) for code in run.end(60)), run.outputs()
    first, second = (run.machines.output(index) for index in range(2))
    axis = "pp" if layout == "a stage" else "dp"
    assert f"rank 0 ({axis} 0 of 2) on nodea gave up" in first, first[-3000:]
    assert re.search(rf"The job waits for: rank 1 \({axis} 1 of 2\) on nodeb\.", first), first[-3000:]
    assert re.search(rf"rank 1 \({axis} 1 of 2\) on nodeb: silent; last seen: ", first), first[-3000:]
    assert re.search(r"The settings of rank 0 .* from /.*/mine\.yaml", first), first[-3000:]
    if lost == "cut":
        assert "The store of the job on 10.77.0.1 has not answered" in second, second[-3000:]
        assert f"rank 1 ({axis} 1 of 2) on nodeb gave up" in second, second[-3000:]


def test_files_that_differ_are_named_with_their_machines(machines: Callable[..., Machines]) -> None:
    run = Run(machines(own_disk=True), "a stage")
    (run.machines.disks[1] / "mine.yaml").write_text(
        (run.machines.disks[0] / "mine.yaml").read_text().replace("num_microbatches: 4", "num_microbatches: 2")
    )
    for index in range(2):
        run.start(index)
    assert all(run.end()), run.outputs()
    for index in range(2):
        assert re.search(
            r"rank 1 on nodeb \[.*/mine\.yaml .*\] made another config than rank 0 on nodea \[.*/mine\.yaml ",
            run.machines.output(index),
        ), run.outputs()


def test_the_doctor_finds_what_is_between_the_machines(machines: Callable[..., Machines]) -> None:
    run = Run(machines(resolves_to="loopback", delay_s=0.01), "a stage")

    def ask(*ranks: int) -> list[int]:
        run.running = [
            run.machines.start(
                rank,
                ["-m", "hf_parallel", "doctor", "--peers", "mine.yaml", "--machine-rank", str(rank), "--wait", "8"],
            )
            for rank in ranks
        ]
        return run.end(60)

    assert ask(0, 1) == [0, 0], run.outputs()
    for index in range(2):
        output = run.machines.output(index)
        assert "machines              2 of 2: nodea (10.77.0.1), nodeb (10.77.0.2)" in output, output
        assert re.search(r"warning +nodea - nodeb +2\d\.\d\d ms there and back, .* Gbit/s to nodea", output), output
    assert ask(0) == [1]
    assert "machine 1 of 2 did not come within 8 s; here are nodea (10.77.0.1)" in run.machines.output(0)
    assert ask(1) == [1]
    assert "machine 0 was not reached at 10.77.0.1:29500 for 8 s: the connection was refused" in run.machines.output(1)
    run.machines.cut()
    assert ask(1) == [1]
    assert re.search(
        r"machine 0 was not reached at 10\.77\.0\.1:29500 for 8 s: nothing answers\n +fix: Open all TCP ports",
        run.machines.output(1),
    )
