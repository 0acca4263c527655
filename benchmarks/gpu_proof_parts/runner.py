"""Runs steps, each in a process of its own with a time limit, and keeps what they found. Needs the standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias


Status = Literal["passed", "failed", "timed out", "skipped"]
LIMIT_S = 480.0
LAST_LINES = 40
GRACE_S = 5.0  # from asking a step to end to ending it

# Says why a machine cannot run a step, or None.
Need: TypeAlias = Callable[[Any], str | None]


@dataclass(frozen=True)
class Step:
    """One thing to show.

    Args:
        name: For `--only` and `--from`.
        shows: What it shows, in a few words.
        command: Writes what it found as JSON into the file whose path is appended.
        needs: What the machine must have.
        env: Added to the environment.
        limit_s: Seconds after which it is killed with all that it started.
    """

    name: str
    shows: str
    command: Sequence[str]
    needs: Sequence[Need] = ()
    env: dict[str, str] = field(default_factory=dict)
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """How a step went: one line of the report.

    Args:
        step: Its name.
        status: "passed" if all that it compares agrees.
        seconds: That it took.
        reason: Of anything but "passed"; the end of what the step wrote if it failed.
        figures: What it found.
        machine: The machine, in a few words: lines of another one are not read again.
        at: When it ended, in UTC.
    """

    step: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    at: str = ""


class UnknownStepError(ValueError):
    """No step has this name."""


def chosen(steps: Sequence[Step], only: Sequence[str] = (), first: str | None = None) -> list[Step]:
    """The steps to run: all, those named, or all from one on.

    Raises:
        UnknownStepError: Names the steps that there are.
    """
    names = [step.name for step in steps]
    for name in [*only, *([first] if first is not None else [])]:
        if name not in names:
            raise UnknownStepError(f"there is no step {name!r}: the steps are {', '.join(names)}")
    start = names.index(first) if first is not None else 0
    return [step for step in steps[start:] if not only or step.name in only]


def run_step(step: Step, machine: Any, label: str) -> Outcome:
    """Run a step, or say why this machine cannot."""
    reasons = [reason for need in step.needs if (reason := need(machine)) is not None]
    if reasons:
        return _outcome(step, "skipped", 0.0, label, "; ".join(reasons))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"gpu-proof-{step.name}-") as folder:
        found, log = Path(folder) / "figures.json", Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*step.command, str(found)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | step.env,
                start_new_session=True,  # ranks end with it
            )
            ended = _ends(process, step.limit_s)
        seconds, last = time.monotonic() - start, _last_lines(log)
        figures = json.loads(found.read_text()) if found.exists() else {}
    if not ended:
        return _outcome(step, "timed out", seconds, label, f"killed after {step.limit_s:g} s\n{last}", figures)
    if process.returncode:
        reason = figures.get("failed") or f"exit code {process.returncode}\n{last}"
        return _outcome(step, "failed", seconds, label, str(reason), figures)
    return _outcome(step, "passed", seconds, label, "", figures)


def _outcome(
    step: Step, status: Status, seconds: float, label: str, reason: str, figures: dict[str, Any] | None = None
) -> Outcome:
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return Outcome(step.name, status, round(seconds, 1), reason, figures or {}, label, at)


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether a process ends in time; it and all of its session have ended afterwards."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end_session(process)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S if number == signal.SIGTERM else None)
        except subprocess.TimeoutExpired:
            continue


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def run_steps(
    steps: Iterable[Step], machine: Any, label: str, lines: Path, say: Callable[[str], None]
) -> list[Outcome]:
    """Run steps one after the other, append a line for each to a file, and tell how it goes."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for step in steps:
        say(f"{step.name}: {step.shows} ...")
        outcome = run_step(step, machine, label)
        with lines.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        say(f"{step.name}: {outcome.status} in {outcome.seconds:.0f} s{_first_line(outcome.reason)}")
        outcomes.append(outcome)
    return outcomes


def _first_line(reason: str) -> str:
    return f", {reason.splitlines()[0]}" if reason else ""


def latest(lines: Path, label: str, steps: Sequence[Step]) -> list[Outcome]:
    """The last outcome of each step on this machine, in the order of the steps."""
    found: dict[str, Outcome] = {}
    for line in lines.read_text().splitlines() if lines.exists() else []:
        outcome = Outcome(**json.loads(line))
        if outcome.machine == label:
            found[outcome.step] = outcome
    return [found[step.name] for step in steps if step.name in found]


def python_command(script: Path, *arguments: str) -> list[str]:
    """A command that runs a script with this Python."""
    return [sys.executable, str(script), *arguments]
