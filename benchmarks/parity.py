"""Compare the example's training curve under every layout with that of one process: `python benchmarks/parity.py`.

Every layout trains the demo's model on the same rows in the same order: the rows of a step are shared out among the
data-parallel model copies. The losses of all steps, and the evaluation before and after, must agree with one process to
`TOLERANCE`. The numbers come from `trainer_state.json` at full precision. Runs are sequential, on the CPU.

Writes build/reports/parity.json; exits with 1 if a layout differs, fails or hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "finetune_llama7b.py"
TOLERANCE = 1e-4
GLOBAL_ROWS = 4
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Layout:
    """One way to run the example.

    Args:
        name: For the table.
        recipe: File name in recipes/, or None for plain `python`.
        dp_size: Model copies that share the rows of a step.
    """

    name: str
    recipe: str | None = None
    dp_size: int = 1


LAYOUTS = (
    Layout("1 process"),
    Layout("pp2", "cpu_pp2.yaml"),
    Layout("pp2 zbv", "cpu_pp2_zbv.yaml"),
    Layout("dp2", "cpu_dp2.yaml", dp_size=2),
    Layout("dp2 zero1", "cpu_dp2_zero1.yaml", dp_size=2),
    Layout("tp2", "cpu_tp2.yaml"),
    Layout("tp2 sp", "cpu_tp2_sp.yaml"),
    Layout("pp2xdp2", "cpu_pp2_dp2.yaml", dp_size=2),
    Layout("pp2xtp2", "cpu_pp2_tp2.yaml"),
)


@dataclass
class Outcome:
    """What one layout did.

    Args:
        layout: Its name.
        losses: Label -> loss: evaluation before, every step, evaluation after. Empty if the run failed.
        seconds: Wall-clock time of the run in s.
        error: Why there are no losses.
        difference: Largest absolute difference from one process, once compared.
    """

    layout: str
    losses: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    difference: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the losses were compared and agree; a NaN does not."""
        return self.difference is not None and self.difference <= TOLERANCE


def build_command(layout: Layout, steps: int, output_dir: Path) -> list[str]:
    """Return the command line that trains `steps` steps under `layout`."""
    rows = str(GLOBAL_ROWS // layout.dp_size)
    launch = [sys.executable]
    if layout.recipe is not None:
        recipe = ROOT / "recipes" / layout.recipe
        launch += ["-m", "accelerate.commands.launch", "--config_file", str(recipe)]
    settings = {
        "output_dir": str(output_dir),
        "max_steps": str(steps),
        "block_size": str(BLOCK_SIZE),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "max_eval_samples": str(GLOBAL_ROWS),
        "warmup_steps": "0",
        "logging_steps": "1",
        "save_strategy": "no",
        "disable_tqdm": "true",
        "use_cpu": "true",
    }
    return [*launch, str(SCRIPT), "--demo", *(word for key, value in settings.items() for word in (f"--{key}", value))]


def run_command(command: Sequence[str], log: Path, timeout_s: float) -> str | None:
    """Run `command` with its output in `log`; return None or what went wrong. Leaves no process behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except psutil.TimeoutExpired:
            return f"no end after {timeout_s:.0f} s (--timeout)"
        finally:
            end_family(process)
    return f"exit code {code}" if code else None


def end_family(process: psutil.Popen) -> None:
    """End a process and its descendants. Workers of a launcher lead sessions of their own: no signal reaches them all."""
    if process.is_running():
        family = [*process.children(recursive=True), process]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=30)


def read_losses(output_dir: Path) -> dict[str, float]:
    """Return the losses of a finished run: evaluation before training, every step, evaluation after it."""
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    metrics = json.loads((output_dir / "all_results.json").read_text())
    steps = {f"step {entry['step']}": entry["loss"] for entry in history if "loss" in entry}
    return {"eval first": metrics["eval_before_loss"], **steps, "eval last": metrics["eval_loss"]}


def run_layout(layout: Layout, steps: int, timeout_s: float) -> Outcome:
    """Train under one layout; the exported model is thrown away, the log of a failed run is kept."""
    outcome = Outcome(layout.name)
    logs = ROOT / "build" / "reports"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"parity_{(layout.recipe or 'one_process').removesuffix('.yaml')}.log"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome.error = run_command(build_command(layout, steps, Path(folder)), log, timeout_s)
        outcome.seconds = time.perf_counter() - start
        if outcome.error is None:
            outcome.losses = read_losses(Path(folder))
    if outcome.error is not None:
        outcome.error += f"; the log is {log}"
    return outcome


def compare(reference: Outcome, outcome: Outcome) -> None:
    """Fill in the largest difference from `reference`; a value that only one of them has makes it infinite."""
    if not reference.losses or not outcome.losses:
        return
    if reference.losses.keys() != outcome.losses.keys():
        outcome.difference = float("inf")
        return
    differences = [abs(outcome.losses[label] - loss) for label, loss in reference.losses.items()]
    # max() would let a NaN through or not, depending on its place.
    outcome.difference = max(differences) if all(d == d for d in differences) else float("nan")


def build_table(outcomes: Sequence[Outcome]) -> Table:
    """Return losses by row and layouts by column, with the verdict below."""
    title = f"loss of SmolLM2-135M, {GLOBAL_ROWS} x {BLOCK_SIZE} tokens a step, fp32; PASS: within {TOLERANCE:g}"
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.layout, justify="right", min_width=8)
    labels = max((list(outcome.losses) for outcome in outcomes), key=len)
    for label in labels:
        cells = [f"{o.losses[label]:.6f}" if label in o.losses else "-" for o in outcomes]
        table.add_row(label, *cells, end_section=label == labels[-1])
    table.add_row("max diff", *("-" if o.difference is None else f"{o.difference:.1e}" for o in outcomes))
    table.add_row("seconds", *(f"{o.seconds:.0f}" for o in outcomes))
    table.add_row("verdict", *("PASS" if o.passed else "FAIL" for o in outcomes))
    return table


def main() -> int:
    """Run the layouts, print the table, write the report; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the example's losses under every layout with one process.")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of every run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run may take")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "parity.json")
    arguments = parser.parse_args()
    console = Console()
    outcomes: list[Outcome] = []
    for layout in LAYOUTS:
        console.print(f"{layout.name} ...")
        outcomes.append(run_layout(layout, arguments.steps, arguments.timeout))
        compare(outcomes[0], outcomes[-1])
    console.print(build_table(outcomes))
    for outcome in outcomes:
        if outcome.error is not None:
            console.print(f"{outcome.layout}: {outcome.error}", style="red", markup=False)
    passed = all(outcome.passed for outcome in outcomes)
    report = {"tolerance": TOLERANCE, "passed": passed, "layouts": [asdict(outcome) for outcome in outcomes]}
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
