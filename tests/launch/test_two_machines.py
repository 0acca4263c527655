"""Two machines with host names of their own train, resume and fail as one would.

If a test fails here, a run on a cluster waits for ever without a word, or trains something else than one process does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from two_machines import ADDRESSES, HOSTS, ROOT, Machines, clean, need_namespaces


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
        if state.global_step >= 4 and what in ("until cut", "spot"):
            time.sleep(0.1)

args = TrainingArguments(
    "out", per_device_train_batch_size=rows, max_steps=steps, save_strategy="steps" if what in ("save", "spot") else "no", save_steps=3,
    logging_steps=1, report_to=[], disable_tqdm=True, seed=3, save_total_limit=2,
    lr_scheduler_type="constant",
)
trainer = Trainer(
    tiny.llama(), args, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=[HFParallelCallback(), Ready()]
)
if what == "spot":  # whoever starts it, now or later
    resume = any(name.startswith("checkpoint-") for name in os.listdir("out")) if os.path.isdir("out") else False
trainer.train(resume_from_checkpoint=resume)
print("resumed" if resume else "anew", flush=True)
trainer.save_model("final")
print("trained", rank, trainer.state.global_step, os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
"""
LAYOUTS = {
    "a stage": (2, "{pp_size: 2, pipeline: {num_microbatches: 4}}", 8),
    "a replica": (2, "{}", 4),
    "tp x dp": (4, "{tp_size: 2}", 4),
    "pp x dp": (4, "{pp_size: 2, pipeline: {num_microbatches: 2}}", 4),
    "replicas": (4, "{}", 2),
    "ZeRO 3": (2, "{zero: {stage: 3}}", 4),
}


class Run:
    """A training run on both machines.

    Args:
        machines: They.
        layout: A key of `LAYOUTS`.
        launcher: "accelerate" or "torchrun".
        address: Of machine 0, as its file says it.
        timeout_s: Longest wait for another rank.
    """

    def __init__(
        self,
        machines: Machines,
        layout: str,
        launcher: str = "accelerate",
        address: str = ADDRESSES[0],
        timeout_s: int = 8,
    ) -> None:
        self.machines, self.launcher, self.address = machines, launcher, address
        self.processes, section, self.rows = LAYOUTS[layout]
        self.section = section[:-1] + (", " if section != "{}" else "") + f"monitor: {{hang_timeout_s: {timeout_s}}}}}"
        self.running: list[subprocess.Popen[bytes]] = []
        for disk in set(machines.disks):
            (disk / "train.py").write_text(SCRIPT)
            recipe = RECIPE.format(processes=self.processes, address=address, section=self.section)
            (disk / "mine.yaml").write_text(recipe)

    def start(self, index: int, steps: int = 3, start: str = "anew", what: str = "train", restarts: int = 0) -> None:
        variables: dict[str, str] = {}
        script = ["train.py", str(self.rows), str(steps), start, what]
        if self.launcher == "accelerate":
            options = ["accelerate.commands.launch", "--config_file", "mine.yaml", "--machine_rank", str(index)]
            options += ["--max_restarts", str(restarts)]
        else:
            options = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(index)]
            options += ["--nproc-per-node", str(self.processes // 2), "--master-addr", self.address]
            options += ["--master-port", "29500"]
            variables = {"HF_PARALLEL_CONFIG": "mine.yaml"}
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
        seed=3, use_cpu=True, lr_scheduler_type="constant",
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
    ("layout", "launcher", "resolves_to", "own_disk"),
    [
        ("a stage", "accelerate", "loopback", True),
        ("a replica", "torchrun", "docker", False),
        ("tp x dp", "accelerate", "nothing", False),
        ("ZeRO 3", "accelerate", "card", True),
        ("a stage", "torchrun", "nothing", False),
    ],
)
def test_two_machines_train_what_one_process_does(
    layout: str, launcher: str, resolves_to: str, own_disk: bool, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    run = Run(machines(resolves_to=resolves_to, own_disk=own_disk), layout, launcher)
    for index in range(2):
        run.start(index)
    assert run.end() == [0, 0], run.outputs()
    assert_same(run.machines.disks[0] / "final", one_process(tmp_path / "one", 3))


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        (
            "pp x dp",
            ("nodes of 2 ranks; neighbours are the replicas of a stage", "pp 2: network", "dp 2: links inside a node"),
        ),
        ("replicas", ("2 nodes of 2 ranks", "summed inside each node, then between nodes")),
    ],
)
def test_what_crosses_the_network_is_said_and_trains_what_one_process_does(
    layout: str, lines: tuple[str, ...], machines: Callable[..., Machines], tmp_path: Path
) -> None:
    run = Run(machines(), layout)
    for index in range(2):
        run.start(index)
    assert run.end() == [0, 0], run.outputs()
    for line in lines:
        assert line in run.machines.output(0), run.outputs()
    assert_same(run.machines.disks[0] / "final", one_process(tmp_path / "one", 3))


def test_a_run_is_resumed_from_a_folder_that_both_share(machines: Callable[..., Machines], tmp_path: Path) -> None:
    run = Run(machines(), "a stage")
    for index in range(2):
        run.start(index, 3, "anew", "save")
    assert run.end() == [0, 0], run.outputs()
    for index in range(2):
        run.start(index, 6, "resume", "save")
    assert run.end() == [0, 0, 0, 0], run.outputs()
    assert_same(run.machines.work / "final", one_process(tmp_path / "one", 6))


def test_checkpoints_in_a_folder_of_each_machine_are_refused_before_training(
    machines: Callable[..., Machines],
) -> None:
    run = Run(machines(own_disk=True), "a stage", timeout_s=60)
    for index in range(2):
        run.start(index, 3, "anew", "save")
    assert all(run.end()), run.outputs()
    for index in range(2):
        said = r"output_dir=\S+: rank 1 on nodeb \(\S+\) does not see what rank 0 on nodea wrote there\. Is this folder shared\?"
        assert re.search(said, run.machines.output(index)), run.outputs()


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


def test_a_machine_that_is_replaced_takes_part_from_the_last_checkpoint(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    """As a spot machine that is taken away: its launcher and its processes are gone, and the command is started again there."""
    run = Run(machines(), "a replica")
    for index in range(2):
        run.start(index, 40, "anew", "spot", restarts=3)
    run.until(lambda: all((run.machines.work / f"ready{rank}").exists() for rank in range(2)))
    run.machines.sh(1, "kill -9 $(ls /proc | grep -E '^[0-9]+$' | grep -vxE \"1|$$\") 2> /dev/null; true")
    assert run.running.pop().wait(30) != 0
    run.start(1, 40, "anew", "spot", restarts=3)
    assert run.end(150) == [0, 0], run.outputs()
    assert "resumed" in run.machines.output(0).split(), run.outputs()
    assert_same(run.machines.work / "final", one_process(tmp_path / "one", 40))


@pytest.fixture
def cluster(machines: Callable[..., Machines], tmp_path: Path) -> tuple[Machines, dict[str, str]]:
    """Two machines with the templates in `work`, and stand-ins for Slurm and ssh that run commands on both."""
    both = machines(resolves_to="loopback")
    for template in (ROOT / "examples" / "cluster").iterdir():
        shutil.copy(template, both.work)
    (both.work / "train.py").write_text(SCRIPT)
    tools = tmp_path / "tools"
    tools.mkdir()
    enter = [" ".join(both.inside(index, [])) for index in range(2)]
    stand_ins = {
        "scontrol": "echo nodea; echo nodeb",
        "srun": f'''while [[ $1 == --* ]]; do shift; done
        for i in 0 1; do export SLURM_PROCID=$i SLURM_NNODES=2
            [ $i = 0 ] && on="{enter[0]}" || on="{enter[1]}"
            $on bash -c 'cd {both.work} && exec "$@"' task "$@" & pids+=($!); done
        for pid in "${{pids[@]}}"; do wait $pid || code=$?; done; exit ${{code:-0}}''',
        "ssh": f'''while [[ $1 == -* ]]; do [ $1 = -o ] && shift; shift; done
        [ $1 = nodea ] && on="{enter[0]}" || on="{enter[1]}"
        shift; exec $on bash -c "$*"''',
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests"])), "HF_HUB_OFFLINE": "1"}
    return (
        both,
        clean(os.environ) | variables | {"OMP_NUM_THREADS": "1", "SCRIPT": "train.py 8 3 anew train", "PER_NODE": "2"},
    )


def finish(command: list[str], both: Machines, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=both.work, env=env, capture_output=True, text=True, timeout=200, check=False)
    logs = "".join(log.read_text() for log in both.work.glob("machine*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs[-3000:]
    return done.stdout + done.stderr + logs


@pytest.mark.parametrize("way", ["slurm", "ssh", "torchrun", "kubernetes"])
def test_the_templates_train(way: str, cluster: tuple[Machines, dict[str, str]], tmp_path: Path) -> None:
    both, env = cluster
    expected = one_process(tmp_path / "one", 3)
    if way == "slurm":
        output = finish(["bash", "slurm.sh"], both, env | {"SLURM_JOB_NODELIST": "node[a-b]", "SLURM_JOB_ID": "7"})
    elif way == "ssh":
        output = finish(["bash", "ssh.sh"], both, env | {"SCRIPT": "'train.py' 8 3 anew train"})
    else:
        if way == "torchrun":
            commands = [f"bash torchrun.sh {index}" for index in range(2)]
        else:
            _, job = yaml.safe_load_all((both.work / "kubernetes.yaml").read_text())
            pod = job["spec"]["template"]["spec"]
            first, then = pod["initContainers"][0]["args"][0], pod["containers"][0]["args"][0]
            then = then.replace("train.py", "train.py 8 3 anew train")
            commands = [f"export JOB_COMPLETION_INDEX={index}; {first} && {then}" for index in range(2)]
            for index in range(2):
                both.sh(index, f"echo {ADDRESSES[0]} train-0.train >> /etc/hosts")
        both.running += [
            subprocess.Popen(
                both.inside(index, ["bash", "-c", f"cd {both.work} && {{ {command}; }} > machine{index}.log 2>&1"]),
                env=env,
            )
            for index, command in enumerate(commands)
        ]
        codes = [process.wait(200) for process in both.running]
        output = "".join((both.work / f"machine{index}.log").read_text() for index in range(2))
        assert codes == [0, 0], output[-6000:]
    assert output.count("2 of 2: nodea (10.77.0.1), nodeb (10.77.0.2)") == 2
    assert output.count("trained") == 4
    assert_same(both.work / "final", expected)
