"""Runs that are saved under one layout and resumed under another, for the tests and for `make resume-matrix`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.checkpoints.state.dcp import TensorIndex
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.training_state import TENSORS, read_description, snapshot, write_snapshot


ENV = {"ACCELERATE_USE_CPU": "true"}
SAVED_AT, STEPS = 3, 8  # in the middle of the first epoch of five steps; five steps follow
CHECKPOINT = f"checkpoint-{SAVED_AT}"
ROWS, BATCH = 40, 8

PP2 = {"pp_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, PP2),
    "tp2": (2, {"tp_size": 2}),
    "pp2xdp2": (4, PP2),
    "pp2xtp2": (4, {**PP2, "tp_size": 2}),
    "zero1": (2, {"zero": {"stage": 1}}),
    "fsdp2": (2, {"zero": {"stage": 3}}),
}


# Other schedules, and stages of which a rank has several.
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpipe": (2, {**PP2, "schedule": "gpipe"}),
    "zbv": (2, {**PP2, "schedule": "zbv_zero_bubble"}),
}
# Experts on several replicas, for models that have some.
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep_size": 2}),
    "ep2xzero1": (2, {"ep_size": 2, "zero": {"stage": 1}}),
    "dp4xep2xzero1": (4, {"ep_size": 2, "zero": {"stage": 1}}),
    "pp2xep2": (4, {**PP2, "ep_size": 2}),
}
# The sequence of each row on several ranks.
SEQUENCES: dict[str, tuple[int, dict[str, Any]]] = {
    "sp2": (2, {"sp_size": 2}),
    "dp2xsp2xzero1": (4, {"sp_size": 2, "zero": {"stage": 1}}),
}
KNOWN = {**LAYOUTS, **SCHEDULES, **EXPERTS, **SEQUENCES}


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        layout: Name of its layout.
        folder: Its output directory.
        resume: The checkpoint it goes on from, if any.
        model: Name in `tiny.MODELS`.
        parallel: Settings beside the layout's.
        arguments: TrainingArguments beside the usual ones.
        processes: World size, if it is not the layout's own.
    """

    layout: str
    folder: str
    resume: str | None = None
    model: str = "uneven"
    parallel: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    processes: int | None = None

    @property
    def world_size(self) -> int:
        return self.processes or KNOWN[self.layout][0]

    @property
    def settings(self) -> dict[str, Any]:
        return {**KNOWN[self.layout][1], **self.parallel}


Cell: TypeAlias = tuple[str, str]
# The job that resumed, its losses, and those of the run that was not interrupted.
Continued: TypeAlias = tuple[Job, list[float], list[float]]


class StateAgain(TrainerCallback):
    """Writes weights and training state once more as soon as they were read, to be compared with what was read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trainer = folder, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and self.trainer is not None:
            holdings = self.trainer._holdings()
            self.trainer.save_model(str(self.folder))
            taken = snapshot(self.folder, holdings, self.trainer._bare_optimizer())
            write_snapshot(self.folder, taken, holdings.mesh)


def make_trainer(job: Job) -> Trainer:
    settings = job.settings
    replicas = job.world_size // math.prod(settings.get(axis, 1) for axis in ("pp_size", "tp_size", "sp_size"))
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // replicas,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "adam_epsilon": 1e-5,  # see NO_NOISE in trainer_cases
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "steps" if job.resume is None else "no",
        "save_steps": SAVED_AT,
    }
    again = StateAgain(Path(job.folder) / "again")
    model = tiny.MODELS[job.model]()
    if job.resume is not None:
        with torch.no_grad():
            adapted = hasattr(model, "peft_config")  # what adapters are on is not in a checkpoint
            for parameter in model.parameters():
                if parameter.requires_grad or not adapted:
                    parameter.mul_(0.5)  # nothing may be left of what the model was made with
    trainer = Trainer(
        model=model,
        args=TrainingArguments(job.folder, **{**arguments, **job.arguments}),
        train_dataset=tiny.rows(ROWS, True),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({}, **settings), again],
    )
    again.trainer = trainer
    return trainer


def run_job(job: Job) -> list[float]:
    """Train; the losses of all steps of this run."""
    trainer = make_trainer(job)
    trainer.train(resume_from_checkpoint=job.resume)
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    done = SAVED_AT if job.resume is not None else 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > done]


def jobs_main(rank: int, world_size: int, jobs: list[Job]) -> list[list[float]]:
    return [json.loads(json.dumps(run_job(job))) for job in jobs]


def run_jobs(jobs: list[Job], folder: Path, timeout: float = 900.0) -> list[list[float]]:
    """Run jobs, those of one world size in one launch; the losses of each, in order."""
    found: dict[int, list[float]] = {}
    for world_size in sorted({job.world_size for job in jobs}):
        chosen = [index for index, job in enumerate(jobs) if job.world_size == world_size]
        results = run_ranks(
            jobs_main,
            world_size,
            [jobs[index] for index in chosen],
            tmp_path=folder,
            timeout=timeout,
            init_group=world_size > 1,
            env=ENV,
        )
        found |= dict(zip(chosen, results[0], strict=True))
    return [found[index] for index in range(len(jobs))]


def resumed(folder: Path, saved: Job, layout: str, **changes: Any) -> Job:
    """The job that goes on from what `saved` saved, under another layout."""
    given = {"model": saved.model, "arguments": saved.arguments, **changes}
    name = f"{Path(saved.folder).name}-to-{layout}"
    return Job(layout, str(folder / name), str(Path(saved.folder) / CHECKPOINT), **given)


def run_cells(folder: Path, sources: Mapping[str, Job], cells: Sequence[Cell]) -> dict[Cell, Continued]:
    """Run every source, and every cell (saved, resumed) from the checkpoint of its source."""
    straight = dict(zip(sources, run_jobs(list(sources.values()), folder), strict=True))
    jobs = [resumed(folder, sources[saved], layout) for saved, layout in cells]
    found = run_jobs(jobs, folder)
    return {
        cell: (job, losses, straight[cell[0]][SAVED_AT:]) for cell, job, losses in zip(cells, jobs, found, strict=True)
    }


def read_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a training state, whole, and its description."""
    index = TensorIndex(folder / TENSORS)
    whole = {label: torch.zeros(shape, dtype=dtype) for label, (shape, dtype) in index.tensors.items()}
    index.read([Piece(label, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for label, tensor in whole.items()])
    return whole, read_description(folder)


def states_equal(first: Path, second: Path) -> bool:
    """Whether weights and training states are the same, bit by bit, whatever layouts wrote them."""
    weights, others = (load_file(next(folder.glob("*model.safetensors"))) for folder in (first, second))
    if weights.keys() != others.keys() or not all(torch.equal(weights[name], others[name]) for name in weights):
        return False
    (mine, said), (other, other_said) = read_state(first), read_state(second)
    groups = [[sorted(group["params"]) for group in each["groups"]] for each in (said, other_said)]
    return (
        mine.keys() == other.keys()
        and all(torch.equal(tensor, other[label]) for label, tensor in mine.items())
        and said["numbers"] == other_said["numbers"]
        and groups[0] == groups[1]
    )
