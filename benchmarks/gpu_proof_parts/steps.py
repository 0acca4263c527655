"""The steps, in the order that keeps most if the time is short."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_proof_parts import machine
from gpu_proof_parts.machine import Machine
from gpu_proof_parts.runner import Need, Step, python_command


if TYPE_CHECKING:
    from gpu_proof_parts.ranks import Setting

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kind:
    """A step without what depends on the machine; `function` is "module:name", called in the step's process."""

    name: str
    shows: str
    function: str
    needs: Sequence[Need] = ()
    one_gpu: bool = False


KINDS = (
    Kind("tests", "tests/gpu", "steps:run_tests", (machine.cuda_tensors,), one_gpu=True),
    Kind("nccl-one-rank", "NCCL with one rank, lazy and eager", "nccl:run_one", (machine.nccl,)),
    Kind(
        "nccl-shared-gpu",
        "NCCL with two and four ranks on one GPU",
        "nccl:run_shared",
        (machine.nccl_for_shared_gpus,),
        one_gpu=True,
    ),
    Kind("parity", "pp2, tp2, dp2, zbv and ZeRO 1 against one process", "parity:run"),
    Kind("sanitizer", "torch.cuda's sanitizer over training steps", "sanitizer:run", (machine.cuda_tensors,)),
    Kind(
        "memory",
        "peak memory against the estimate",
        "memory:run",
        (machine.cuda_tensors, machine.free_memory(12 * machine.GB)),
    ),
    Kind(
        "offload",
        "bandwidth to host memory and overlap",
        "kernels:run_offload",
        (machine.free_memory(4 * machine.GB),),
    ),
    Kind(
        "codecs",
        "codecs against the bandwidth of a copy",
        "kernels:run_codecs",
        (machine.free_memory(4 * machine.GB),),
    ),
    Kind(
        "callback",
        "HFParallelCallback against the stock Trainer",
        "callback:run",
        (machine.free_memory(12 * machine.GB),),
    ),
    Kind(
        "throughput",
        "tokens/s and MFU of a model of 1e9 to 7e9 parameters",
        "throughput:run",
        (machine.free_memory(14 * machine.GB),),
    ),
)
MACHINE = "HF_PARALLEL_GPU_PROOF_MACHINE"  # tells a step what was found, so that it needs no CUDA context to ask
NCCL_STEPS = ("nccl-one-rank", "nccl-shared-gpu")


def steps_of(script: Path, found: Machine) -> list[Step]:
    """The steps as commands. A dry run takes gloo for NCCL, so that their code has run."""
    told = {MACHINE: json.dumps(dataclasses.asdict(found))}
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_VISIBLE_DEVICES": machine.first_gpu()}
    made = []
    for kind in KINDS:
        needs = () if found.device != "cuda" and kind.name in NCCL_STEPS else kind.needs
        command = python_command(script, "--device", found.device, "--run", kind.name, "--figures")
        made.append(Step(kind.name, kind.shows, command, needs, told | (shared if kind.one_gpu else {})))
    return made


def run_kind(name: str, folder: Path, figures: Path) -> dict[str, Any]:
    """Run a step in this process; what it found."""
    from gpu_proof_parts.ranks import Setting

    kind = next(kind for kind in KINDS if kind.name == name)
    found = Machine(**json.loads(os.environ[MACHINE]))
    setting = Setting(found, 1 if kind.one_gpu else len(found.gpus), folder, figures)
    module, _, function = kind.function.partition(":")
    run: Callable[[Setting], dict[str, Any]] = getattr(importlib.import_module(f"gpu_proof_parts.{module}"), function)
    return run(setting)


def run_tests(setting: Setting) -> dict[str, Any]:
    """pytest over tests/gpu."""
    report = setting.folder / "tests.xml"
    devices = ["-p", "softcuda.plugin"] if setting.device == "soft" else []
    command = [sys.executable, "-m", "pytest", "-q", *devices, "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    command += [f"--junitxml={report}", f"--basetemp={setting.folder / 'pytest'}"]
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    sys.stdout.write(ended.stdout[-20000:] + ended.stderr[-5000:])
    if not report.exists():
        return {"failed": f"pytest wrote no report: {(ended.stderr or ended.stdout)[-1000:]}"}
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case.get("name", "?") for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    found: dict[str, Any] = {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failures": bad}
    if bad or ended.returncode or skipped == len(cases):
        found["failed"] = f"{len(bad)} of {len(cases)} tests failed, {skipped} skipped: {', '.join(bad)}"
    return found


def _has(case: ElementTree.Element, *names: str) -> bool:
    return any(case.find(name) is not None for name in names)
