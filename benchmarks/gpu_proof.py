"""Show on a machine with one GPU or several what this project can show nowhere else.

    make gpu-proof                                      # all steps, at most 8 minutes each
    make gpu-proof ARGS="--from memory"                 # go on where a run was cut short; --only STEP for single ones
    make gpu-proof ARGS="--device soft"                 # no GPU: the same code at tiny sizes; proves nothing about a GPU
    make gpu-wheels PYTHON_VERSION=3.12                 # where there is a network: packages for a machine without one

Each step is a process of its own. It appends a line to build/reports/gpu-proof.jsonl; the last line of each step on this
machine and this torch makes build/reports/gpu-proof.json and the card, build/reports/gpu-proof.md. Neither a network nor pip
is needed: what is in wheels/ and newer than this Python's own packages is unpacked and found first. A step that the machine
cannot run is skipped with the reason. Exit code 0: no step failed; 1: one did; 2: there is no GPU, or nothing to run it with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from gpu_proof_parts import wheels  # noqa: E402
from gpu_proof_parts.card import card  # noqa: E402
from gpu_proof_parts.machine import machine_of, probe  # noqa: E402
from gpu_proof_parts.runner import UnknownStepError, chosen, latest, run_steps  # noqa: E402
from gpu_proof_parts.steps import run_kind, steps_of  # noqa: E402


REPORTS = ROOT / "build" / "reports"
SITE = ROOT / "build" / "gpu-proof" / "site"
UNPACKED = "HF_PARALLEL_GPU_PROOF_SITE"  # says to a started process that it is looking there already


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STEP", default=(), help="these steps")
    parser.add_argument("--from", dest="first", metavar="STEP", default=None, help="this step and those after it")
    parser.add_argument(
        "--device", choices=("cuda", "soft", "cpu"), default="cuda", help="soft and cpu: no GPU, tiny sizes"
    )
    parser.add_argument("--list", action="store_true", help="name the steps and what they need")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="packages that this Python may lack")
    parser.add_argument("--fill-wheels", metavar="PYTHON_VERSION", default=None, help="download them; needs pip")
    parser.add_argument("--reports", type=Path, default=REPORTS, help="folder of the reports")
    for internal in ("--run", "--figures"):
        parser.add_argument(internal, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def use_wheels(folder: Path) -> None:
    """Look into what the wheels hold before anything else, in this process and all it starts."""
    if UNPACKED not in os.environ:
        names = wheels.unpack(folder, SITE)
        if names:
            say(f"from {folder.name}/: {', '.join(names)}")
        os.environ[UNPACKED] = str(SITE)
        paths = [str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(3, os.environ[UNPACKED])


def run_one(name: str, figures: Path, device: str) -> int:
    """A step, in this process."""
    if device == "soft":
        import softcuda.devices  # noqa: F401 - before torch
    with tempfile.TemporaryDirectory(prefix="gpu-proof-ranks-") as folder:
        found = run_kind(name, Path(folder), figures)
    figures.write_text(json.dumps(found))
    return 1 if "failed" in found else 0


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "an unknown commit"


def main() -> int:
    """Run the steps and write the card; returns the exit code."""
    given = options()
    if given.fill_wheels is not None:
        requirements = [*wheels.wanted(ROOT / "pyproject.toml"), *wheels.WANTED_TESTS]
        for name in wheels.fill(given.wheels, given.fill_wheels, requirements):
            say(name)
        return 0
    use_wheels(given.wheels)
    if given.probe:
        say(json.dumps(probe(given.device)))
        return 0
    if given.run is not None:
        return run_one(given.run, Path(given.figures), given.device)
    return run_all(given)


def run_all(given: argparse.Namespace) -> int:
    """All chosen steps, reports and card; what ends this process ends its step too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if given.device == "soft":
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ["PYTHONPATH"]])
        from softcuda.build import build

        build()
    script = Path(__file__).resolve()
    machine = machine_of(given.device, str(script))
    if isinstance(machine, str):
        sys.stderr.write(machine + "\n")
        return 2
    steps = steps_of(script, machine)
    if given.list:
        for step in steps:
            say(f"{step.name:<16} {step.shows}")
        return 0
    try:
        wanted = chosen(steps, given.only, given.first)
    except UnknownStepError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    name = "gpu-proof" if given.device == "cuda" else f"gpu-proof-{given.device}"
    lines = given.reports / f"{name}.jsonl"
    ran = run_steps(wanted, machine, machine.label, lines, say)
    outcomes = latest(lines, machine.label, steps)
    text = card(machine, outcomes, commit(), time.strftime("%Y-%m-%d", time.gmtime()))
    report = {"machine": dataclasses.asdict(machine), "steps": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (given.reports / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.reports / f"{name}.md").write_text(text)
    where = "is the card: docs/results.md says where to post it" if given.device == "cuda" else "is for you alone"
    say(f"\n{text}\n{lines.parent / name}.md {where}.")
    return 1 if any(outcome.status in ("failed", "timed out") for outcome in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
