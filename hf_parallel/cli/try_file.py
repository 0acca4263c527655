"""The `hf-parallel test` command: ten steps with a file on the real launcher, compared with one process.

A launch can succeed although every process trained alone, with the same numbers in each log. So the processes are counted
by a collective of theirs, and the losses are those of one process that trains on all rows.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import gpus
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import find_recipe, read_recipe
from hf_parallel.settings.schedule_names import ASYNCHRONOUS


SCRIPT: Final = Path(__file__).with_name("ten_steps.py")
# Relative difference of a loss that the sums in another order explain, by precision.
TOLERANCES: Final = {"no": 1e-5, "bf16": 3e-2, "fp16": 1e-2}


def try_file(
    file: Annotated[str, typer.Argument(help="An accelerate config file, or the name of a recipe.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each of the two runs may take.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train ten steps with a file on the real launcher and compare them with one process; exit with 1 if they differ."""
    try:
        path = find_recipe(file)
        config, accelerate = read_recipe(path)
        settings = settings_of(config, accelerate)
        with tempfile.TemporaryDirectory(prefix="hf_parallel_test_") as folder:
            launch = ["accelerate.commands.launch", "--config_file", str(path)]
            typer.echo(f"10 steps on {accelerate['num_processes']} processes ...", err=True)
            ours = _run([*launch, str(SCRIPT)], settings, Path(folder, "ours"), timeout)
            typer.echo("10 steps in one process ...", err=True)
            alone = settings | {"alone": True, "rows": settings["rows"] * settings["replicas"], "replicas": 1}
            one = _run([str(SCRIPT)], alone, Path(folder, "one"), timeout)
        found = judge(config, accelerate, ours, one)
    except ConfigError as error:
        typer.echo(json.dumps({"ok": False, "error": str(error)}) if as_json else str(error), err=not as_json)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"{'passed' if found['ok'] else 'FAILED'}: {found['text']}")
    if not found["ok"]:
        raise typer.Exit(1)


def settings_of(config: HFParallelConfig, accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a model and a batch that this layout can train.

    Args:
        config: Our settings.
        accelerate: The file around them.

    Raises:
        ConfigError: This machine cannot start the file.
    """
    machines, processes, on_cpu = (accelerate.get(key) for key in ("num_machines", "num_processes", "use_cpu"))
    if machines not in (None, 1):
        raise ConfigError(
            f"num_machines={machines}: a test starts processes on this machine alone. Try a file with num_machines 1."
        )
    if not isinstance(processes, int) or processes < 1:
        raise ConfigError("num_processes: a test starts a number of processes. Set num_processes in the file.")
    cards = len(gpus())
    if on_cpu is not True and processes > max(cards, 1) and cards:
        raise ConfigError(
            f"num_processes={processes}: this machine has {cards} GPUs. Set num_processes to {cards}, or use_cpu to true."
        )
    pipeline, steps = config.pipeline, config.gradient_accumulation_steps
    split = pipeline.split
    stages = config.pp_size * (pipeline.stages_on_a_rank() or 2)
    count = pipeline.parts_of_batch(config.pp_size)
    precision = str(accelerate.get("mixed_precision") or "no").lower()
    return {
        "blocks": max(4, stages) if isinstance(split, str) else sum(split),
        "heads": math.lcm(4, config.tp_size),
        "rows": count if config.pp_size > 1 else 2,
        "accumulation": 1 if steps == "auto" else steps,
        "replicas": config.dp_size(processes),
        "precision": precision if precision in TOLERANCES else "no",
        "on_cpu": on_cpu is True or not cards,
        "clip": 1.0 if pipeline.vertical_sync else 0.0,
        "alone": False,
    }


def judge(
    config: HFParallelConfig, accelerate: Mapping[str, Any], ours: Mapping[str, Any], one: Mapping[str, Any]
) -> dict[str, Any]:
    """Judge whether both runs gave the same losses.

    Args:
        config: Our settings.
        accelerate: The file around them.
        ours: `losses` and `ranks` (rank, process) of the launched run.
        one: The same of the run of one process.

    Returns:
        `ok`, `text`, the losses and the largest relative difference.
    """
    processes = accelerate["num_processes"]
    met = len({process for _, process in ours["ranks"]})
    pairs = list(zip(ours["losses"], one["losses"], strict=False))
    largest = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=math.inf)
    finite = all(math.isfinite(loss) for loss in ours["losses"])
    tolerance = TOLERANCES.get(str(accelerate.get("mixed_precision") or "no").lower(), TOLERANCES["no"])
    is_late = config.pipeline.schedule in ASYNCHRONOUS
    lossy = config.gradient_compression.method != "none" or config.local_sgd.sync_every > 1 or is_late
    if met != processes:
        text, ok = (
            f"{met} of {processes} processes trained together. See docs/launching.md: each of the others trained alone.",
            False,
        )
    elif not finite or len(ours["losses"]) != len(one["losses"]) or not pairs:
        text, ok = f"the losses are {ours['losses']}, those of one process {one['losses']}.", False
    elif lossy:
        first = abs(pairs[0][0] - pairs[0][1]) / max(abs(pairs[0][1]), 1e-9)
        ok = first <= tolerance
        text = f"{processes} processes trained together; the first loss differs by {first:.1e} of itself from that of one process"
        why = "gradients of older weights" if is_late else "compressed gradients or local steps"
        text += f", the later ones by {largest:.1e} ({why} are not exact)"
    else:
        ok = largest <= tolerance
        text = (
            f"{processes} processes trained together; ten losses differ by at most {largest:.1e} of themselves from those of "
            f"one process (limit {tolerance:.0e})"
        )
    return {
        "ok": ok,
        "text": text,
        "largest_difference": largest,
        "losses": ours["losses"],
        "one_process": one["losses"],
    }


def _run(command: Sequence[str], settings: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Run the script and return what it wrote.

    Raises:
        ConfigError: It failed; with the end of what it printed.
    """
    folder.mkdir()
    launched = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HF_PARALLEL_CONFIG",
    }
    environment = {key: value for key, value in os.environ.items() if key not in launched}
    module = ["-m"] if command[0].startswith("accelerate.") else []
    whole = [sys.executable, *module, *command, json.dumps(dict(settings)), str(folder)]
    if settings["alone"] and not settings["on_cpu"]:
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    start = time.monotonic()
    try:
        done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the run had not ended after {timeout:g} s (--timeout). Give more seconds, or look for the cause with `hf-parallel doctor`."
        ) from None
    result = folder / "result.json"
    if done.returncode or not result.is_file():
        said, _, _ = (done.stderr or done.stdout).partition("torch.distributed.elastic.multiprocessing.api:failed")
        tail = "\n".join(said.strip().splitlines()[-15:])
        raise ConfigError(f"the run ended with {done.returncode} after {time.monotonic() - start:.0f} s:\n{tail}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found
