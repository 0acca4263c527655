"""`hf_parallel.verify`: the proof that a layout trains a model as one process does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_parallel.errors import ConfigError, ParallelError
from hf_parallel.memory.shape import config_of
from hf_parallel.monitor.report.write import finite
from hf_parallel.proof.compare import REFERENCE, Comparison
from hf_parallel.proof.job import Job
from hf_parallel.proof.record import RUN
from hf_parallel.proof.start import COMPARED, ERROR, JOB, JUDGED, LOG, PLACE, SILENT


WORST = 10  # differences that a verdict lists
FEWEST = 3  # steps in half precision: one loss of all perturbed runs is near that of the first too often
AS_ONE = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_PARALLEL_CACHE": "",  # every check is made
}
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HF_PARALLEL_CONFIG_FILE")


@dataclass(frozen=True)
class Verdict:
    """The result of a verification.

    Args:
        model_type: Model type of the config.
        layout: Such as pp2xdp2.
        ok: Whether every loss, gradient and parameter agrees.
        refused: Why the layout does not train this model; None if it does.
        stopped: Message of a rank that noticed by itself that the run went wrong; None if none did.
        loss_max_rel: Largest relative difference of a loss or of the gradients' norm.
        grad_max_rel: Largest relative difference of a gradient, clipped, of any step.
        param_max_rel: Largest relative difference of a parameter after the last step.
        worst: The differences nearest to, or furthest beyond, what is allowed.
        missing_gradients: Gradients that one of the two runs lacks.
        first_divergence: Place where they part: module, microbatch and kind; None without a difference.
    """

    model_type: str
    layout: str
    ok: bool = False
    refused: str | None = None
    stopped: str | None = None
    loss_max_rel: float | None = None
    grad_max_rel: float | None = None
    param_max_rel: float | None = None
    worst: list[dict[str, Any]] = field(default_factory=list)
    missing_gradients: list[str] = field(default_factory=list)
    first_divergence: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The verdict as `--json` writes it; numbers that are not finite become None, since JSON has none."""
        found: dict[str, Any] = finite(dataclasses.asdict(self))
        return found


def verify(  # noqa: PLR0913 - each is an option of the command
    model: str | os.PathLike[str] | Any | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    script: str | os.PathLike[str] | None = None,
    script_arguments: Sequence[str] = (),
    processes: int | None = None,
    steps: int = 3,
    rows: int = 4,
    length: int = 16,
    accumulation: int = 1,
    dtype: str = "fp32",
    layers: int | None = None,
    random_weights: bool = False,
    seed: int = 0,
    tamper: str | None = None,
) -> Verdict:
    """Train a model a few steps in one process and in a layout, on the same weights and batches, and compare everything.

    Every loss, the gradients' norm, every gradient of every step and every parameter after the last one, on every rank. In fp32
    they agree to 1e-5 relative; beyond that, and in bf16 and fp16, a tensor may differ by four times as much as one process differs from
    itself when its weights are moved by half a unit in their last place. Dropout is switched off: masks depend on the layout.
    It starts processes of its own, on the CPU.

    With a script, that is run as it is in each process until the first training of its first Trainer has taken the steps; model,
    batches, precision and optimizer are the script's, the layout is that of `settings`.

    Args:
        model: A transformers config, a `config.json`, a folder with one and perhaps weights, or a name; None with a script.
        settings: Settings of hf_parallel, such as `{"pp_size": 2}`.
        script: A training script that makes a Trainer and calls its `train`.
        script_arguments: Arguments of the script.
        processes: Ranks; None: as few as the layout needs (two replicas with ZeRO).
        steps: Optimizer steps, 1 or more; in bf16 and fp16 at least 3 are trained.
        rows: Rows of a batch of each replica, 1 or more.
        length: Tokens of a row, 4 or more.
        accumulation: Batches of an optimizer step, 1 or more.
        dtype: fp32, or bf16 or fp16 (mixed precision).
        layers: Number of blocks of the model; None: all.
        random_weights: Whether weights are drawn instead of read.
        seed: Seed of weights and data.
        tamper: `module:function`, called with the Trainer of every rank of the layout before its first step: a bug to be found.

    Raises:
        ConfigError: All problems of the arguments.
        ParallelError: A run ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="hf-parallel-verify-") as temporary:
        folder = Path(temporary)
        job = job_of(
            model,
            settings,
            folder,
            processes=processes,
            steps=steps,
            rows=rows,
            length=length,
            accumulation=accumulation,
            dtype=dtype,
            layers=layers,
            random_weights=random_weights,
            seed=seed,
            tamper=tamper,
            script=script,
            arguments=tuple(script_arguments),
        )
        return prove(job, folder)


def job_of(model: Any, settings: Mapping[str, Any] | None, folder: Path, **more: Any) -> Job:
    """The job of arguments of `verify`.

    Args:
        model: Model, as for `verify`; a config is written to the folder.
        settings: Settings, as for `verify`.
        folder: Folder of the job.
        more: Other arguments of `verify`.

    Raises:
        ConfigError: All problems of the arguments.
    """
    script = more.pop("script", None)
    if (script is None) == (model is None):
        raise ConfigError("verify: give a model or a script, one of the two.")
    if script is not None:
        path = Path(script).absolute()
        if not path.is_file():
            raise ConfigError(f"script={script}: there is no file {path}. Give the path of a training script.")
        more["script"] = str(path)
        model = ""
    if hasattr(model, "to_dict"):
        model.save_pretrained(folder / "model")
        model, more["random_weights"] = folder / "model", True
    settings = dict(settings or {})
    processes = more.pop("processes", None) or fewest(settings)
    job = Job(model=str(model), settings=settings, processes=processes, home=os.getcwd(), **more)
    return job if job.dtype == "fp32" else dataclasses.replace(job, steps=max(job.steps, FEWEST))


def fewest(settings: Mapping[str, Any]) -> int:
    """The fewest ranks of a layout: with ZeRO, or without any axis, two copies of the weights; those that share experts."""
    tp, pp, sp, ep = (int(settings.get(f"{axis}_size", 1)) for axis in ("tp", "pp", "sp", "ep"))
    shards = tp * pp * sp
    has_zero = bool(dict(settings.get("zero") or {}).get("stage"))
    replicas = max(ep, 2 if (has_zero and sp == 1) or shards == 1 else 1)
    return replicas * shards


def in_new_process(folder: Path) -> str:
    """Run the job of a folder in a process that imports everything anew; returns what it printed of errors."""
    environment = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS} | AS_ONE
    command = [sys.executable, "-m", "hf_parallel.proof.start", str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr


def prove(job: Job, folder: Path, start: Callable[[Path], str] = in_new_process) -> Verdict:
    """Run a job in a folder, and tell what came out.

    Args:
        job: The job.
        folder: An empty one, or one with the model.
        start: Runs the job that lies in the folder; returns what to show if nothing came out.

    Raises:
        ParallelError: A run ended without a result.
    """
    model_type = "script" if job.script is not None else str(config_of(job.model, trains=True).model_type)
    job.dump(folder / JOB)
    told = start(folder)
    run = folder / COMPARED / REFERENCE / RUN
    if run.exists():
        model_type = json.loads(run.read_text())["model_type"]
    if not (folder / JUDGED).exists():
        refused = _why_not(folder, told, of_script=job.script is not None)
        return Verdict(model_type, job.layout, refused=refused)
    found = Comparison.load(folder / JUDGED)
    place = folder / PLACE
    stopped = [json.loads(path.read_text())["text"] for path in sorted(folder.glob(f"compared/*/{ERROR}"))]
    return Verdict(
        model_type,
        job.layout,
        ok=found.ok and not stopped,
        stopped=next((text for text in stopped if text != SILENT), None),
        loss_max_rel=found.largest("loss", "grad_norm"),
        grad_max_rel=found.largest("gradient"),
        param_max_rel=found.largest("parameter"),
        worst=[dataclasses.asdict(each) for each in found.differences[:WORST]],
        missing_gradients=found.missing,
        first_divergence=json.loads(place.read_text()) if place.exists() else None,
    )


def _why_not(folder: Path, stderr: str, *, of_script: bool) -> str:
    """Why the layout was refused.

    Raises:
        ParallelError: A run failed otherwise.
    """
    found = sorted([*folder.glob(f"*/{ERROR}"), *folder.glob(f"*/*/{ERROR}")])
    errors = {path.parent: json.loads(path.read_text()) for path in found}
    told = {place: error for place, error in errors.items() if SILENT not in error["text"]}
    for error in told.values():
        if error["refused"]:
            return str(error["text"])
    for place, error in told.items():
        if not place.name.startswith("rank") and not of_script:
            line = next(iter(error["text"].strip().splitlines()), "")
            return f"one process without hf_parallel cannot train it either: {error['kind']}: {line}"
    for place, error in (told or errors).items():
        log = place / LOG
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        raise ParallelError(f"verify: {place.name} raised {error['kind']}: {error['text']}\n{tail}")
    raise ParallelError(f"verify: the runs could not be started:\n{stderr[-2000:]}")
