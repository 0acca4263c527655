"""A run that goes on from a checkpoint with something changed: as a stock Trainer that is resumed with the same change, or refused.

The checkpoints are of shards, of stages, of parts and of replicas; the layouts that go on are others, also of three and four ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from thinning import rest_runs, slow_if
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.errors import ParallelError


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ENV = {"ACCELERATE_USE_CPU": "true"}
SAVED_AT, STEPS, ROWS = 3, 6, 72
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "stock": (1, None),
    "one": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, PP2),
    "pp2_zbv": (2, {**PP2, "schedule": "zbv_zero_bubble"}),
    "pp2_uneven": (2, {**PP2, "split": [1, 3]}),
    "tp2": (2, {"tp_size": 2}),
    "zero1": (2, {"zero": {"stage": 1}}),
    "zero3": (2, {"zero": {"stage": 3}}),
    "dp3": (3, {}),
    "pp3": (3, {"pp_size": 3, "num_microbatches": 2}),
    "tp3": (3, {"tp_size": 3}),
    "zero1_3": (3, {"zero": {"stage": 1}}),
    "zero3_3": (3, {"zero": {"stage": 3}}),
    "pp4": (4, {"pp_size": 4, "num_microbatches": 2}),
    "tp4": (4, {"tp_size": 4}),
}
# Name of a checkpoint -> layout and model.
SOURCES = {layout: (layout, "tied") for layout in ("stock", "tp2", "zero3", "dp2", "pp2")}
SOURCES |= {"untied": ("tp2", "untied"), "frozen": ("pp2", "frozen"), "more": ("dp2", "more")}


def partly_frozen() -> Any:
    model = tiny.llama(tied=True)
    model.model.layers[0].requires_grad_(False)
    return model


def resized() -> Any:
    model = tiny.llama(tied=True)
    model.resize_token_embeddings(tiny.VOCAB + 1)
    return model


def more() -> Any:
    """A parameter that no forward reads."""
    model = tiny.llama(tied=True)
    model.register_parameter("temperature", torch.nn.Parameter(torch.ones(3)))
    return model


MODELS = {
    "tied": lambda: tiny.llama(tied=True),
    "frozen": partly_frozen,
    "resized": resized,
    "half": lambda: tiny.llama(tied=True).to(torch.bfloat16),
    "untied": tiny.llama,
    "more": more,
}


@dataclass(frozen=True)
class Job:
    """One run; its defaults are those of the runs that save."""

    layout: str
    folder: str
    resume: str | None = None
    model: str = "tied"
    rows: int = ROWS
    batch: int = 12
    arguments: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""


class AtStart(TrainerCallback):
    """Keeps the weights that were read, which are those of the whole model where a rank has it."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = {name: p.detach().clone() for name, p in model.named_parameters()}


def made(job: Job) -> tuple[Trainer, AtStart]:
    world_size, settings = LAYOUTS[job.layout]
    replicas = world_size // ((settings or {}).get("pp_size", 1) * (settings or {}).get("tp_size", 1))
    model, start = MODELS[job.model](), AtStart()
    if job.resume is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # nothing may be left of what the model was made with
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": job.batch // replicas,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "adam_epsilon": 1e-5,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "steps" if job.resume is None else "no",
        "save_steps": SAVED_AT,
    }
    options: dict[str, Any] = {}
    if job.optimizer == "groups":
        named = list(model.named_parameters())
        groups = [{"params": [p for _, p in named[:3]], "lr": 1e-4}, {"params": [p for _, p in named[3:]]}]
        options["optimizers"] = (torch.optim.AdamW(groups, lr=1e-3), None)
    return Trainer(
        model=model,
        args=TrainingArguments(job.folder, **{**arguments, **job.arguments}),
        train_dataset=tiny.rows(job.rows, True),
        data_collator=tiny.collate,
        callbacks=[start, *([] if settings is None else [HFParallelCallback({}, **settings)])],
        **options,
    ), start


def run(job: Job) -> dict[str, Any]:
    """Losses, norms and learning rates of the steps of this run; or why it was refused."""
    error = None
    trainer, start = made(job)
    try:
        trainer.train(resume_from_checkpoint=job.resume)
    except (ParallelError, ValueError, RuntimeError) as refused:
        error = f"{type(refused).__name__}: {refused}"
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    keys = ("step", "loss", "grad_norm", "learning_rate")
    done = SAVED_AT if job.resume else 0
    logs = [
        {key: log[key] for key in keys} for log in trainer.state.log_history if "loss" in log and log["step"] > done
    ]
    return {"error": error, "logs": logs, "start": {name: float(p.double().sum()) for name, p in start.found.items()}}


def main(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    return [json.loads(json.dumps(run(job))) for job in jobs]


def launch(jobs: dict[str, Job], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Job -> what each rank found; one launch a world size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in sorted({LAYOUTS[job.layout][0] for job in jobs.values()}):
        names = [name for name, job in jobs.items() if LAYOUTS[job.layout][0] == world_size]
        options: dict[str, Any] = {"tmp_path": folder, "timeout": 250, "init_group": world_size > 1, "env": ENV}
        ranks = run_ranks(main, world_size, [jobs[name] for name in names], **options)
        found |= {name: list(each) for name, *each in zip(names, *ranks, strict=True)}
    return found


# What is changed; a stock Trainer that is resumed with it is the reference.
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "accumulation": {"batch": 6, "arguments": {"gradient_accumulation_steps": 2}},
    "accumulation_alone": {"arguments": {"gradient_accumulation_steps": 2, "max_steps": 5}},
    "longer": {"rows": 108},
    "shorter": {"rows": 48},
    "epochs": {"arguments": {"max_steps": -1, "num_train_epochs": 2}},
    "lr": {"arguments": {"learning_rate": 1e-2, "max_steps": 9}},
    "scheduler": {"arguments": {"lr_scheduler_type": "linear"}},
    "decay": {"arguments": {"weight_decay": 0.0, "adam_beta1": 0.5}},
    "fused": {"arguments": {"optim": "adamw_torch_fused"}},
    "half": {"model": "half"},
}
RIGHT: dict[str, tuple[str, str]] = {  # change, saved and resumed as
    **{f"nothing-tp2-{layout}": ("tp2", layout) for layout in ("dp3", "pp4", "pp2_uneven", "tp4")},
    **{f"nothing-zero3-{layout}": ("zero3", layout) for layout in ("pp3", "zero1_3", "tp4")},
    **{f"nothing-dp2-{layout}": ("dp2", layout) for layout in ("tp3", "zero3_3", "pp2_zbv")},
    **{f"nothing-pp2-{layout}": ("pp2", layout) for layout in ("zero3_3", "tp3", "pp4", "dp3")},
    "accumulation-tp2-pp2": ("tp2", "pp2"),
    "accumulation-zero3-dp2": ("zero3", "dp2"),
    "accumulation_alone-dp2-pp2": ("dp2", "pp2"),
    "longer-zero3-tp2": ("zero3", "tp2"),
    "longer-pp2-dp3": ("pp2", "dp3"),
    "shorter-dp2-zero1": ("dp2", "zero1"),
    "shorter-tp2-pp3": ("tp2", "pp3"),
    "epochs-pp2-zero3": ("pp2", "zero3"),
    "lr-zero3-pp2": ("zero3", "pp2"),
    "scheduler-dp2-tp2": ("dp2", "tp2"),
    "decay-tp2-zero1": ("tp2", "zero1"),
    "fused-tp2-dp2": ("tp2", "dp2"),
    "half-zero3-dp2": ("zero3", "dp2"),
    "half-tp2-zero1": ("tp2", "zero1"),
}
# Change, layouts, what the error says on every rank.
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "frozen-tp2-pp2": ({"model": "frozen"}, "tp2", "pp2", "is not trained now and was when the checkpoint was saved"),
    "frozen-pp2-zero1": ({"model": "frozen"}, "pp2", "zero1", "is not trained now and was when"),
    "frozen-dp2-zero3": ({"model": "frozen"}, "dp2", "zero3", "is not trained now and was when"),
    "resized-tp2-dp2": ({"model": "resized"}, "tp2", "dp2", "vocab_size=99, but this run's model has 100"),
    "resized-pp2-tp2": ({"model": "resized"}, "pp2", "tp2", "vocab_size=99, but this run's model has 100"),
    "optimizer-zero3-pp2": ({"arguments": {"optim": "adafactor"}}, "zero3", "pp2", "the state is that of AdamW"),
    "optimizer-tp2-zero1": ({"arguments": {"optim": "sgd"}}, "tp2", "zero1", "the state is that of AdamW"),
    "groups-pp2-tp2": ({"optimizer": "groups"}, "pp2", "tp2", "is not one of the checkpoint's, which has other"),
    "groups-dp2-zero1": ({"optimizer": "groups"}, "dp2", "zero1", "is not one of the checkpoint's, which has other"),
    "untied-tp2-pp2": ({"model": "untied"}, "tp2", "pp2", "The checkpoint is of another model"),
    "tied-untied-pp2": (
        {},
        "untied",
        "pp2",
        "the checkpoint's model has a parameter lm_head.weight and this run's has none",
    ),
    "tied-untied-zero1": ({}, "untied", "zero1", "the checkpoint's model has a parameter lm_head.weight"),
    "tied-untied-one": ({}, "untied", "one", "the checkpoint's model has a parameter lm_head.weight"),
    "less-more-tp2": ({}, "more", "tp2", "the checkpoint's model has a parameter temperature"),
    "more-dp2-pp2": ({"model": "more"}, "dp2", "pp2", "no tensor named temperature"),
    "unfrozen-frozen-dp2": ({}, "frozen", "dp2", "is trained now and was not when the checkpoint was saved"),
    "unfrozen-frozen-zero1": ({}, "frozen", "zero1", "is trained now and was not when the checkpoint was saved"),
    "untied-zero3-tp2": ({"model": "untied"}, "zero3", "tp2", "The checkpoint is of another model"),
}
# Slow: a change that other rows make between other layouts, of which each saves and each goes on in some row that is not.
REST = (
    "nothing-tp2-pp2_uneven",
    "nothing-tp2-tp4",
    "nothing-zero3-tp4",
    "nothing-dp2-zero3_3",
    "nothing-pp2-pp4",
    "nothing-pp2-dp3",
    "accumulation-zero3-dp2",
    "longer-zero3-tp2",
    "shorter-tp2-pp3",
    "half-tp2-zero1",
    "frozen-dp2-zero3",
    "resized-pp2-tp2",
    "optimizer-tp2-zero1",
    "groups-dp2-zero1",
    "untied-zero3-tp2",
    "tied-untied-zero1",
    "unfrozen-frozen-zero1",
    "nothing-tp2-dp3",
    "nothing-pp2-tp3",
    "frozen-pp2-zero1",
)


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=slow_if(name, REST)) for name in names]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    with_rest = rest_runs(request)
    folder = tmp_path_factory.mktemp("changes")
    saved = {name: Job(layout, str(folder / name), model=model) for name, (layout, model) in SOURCES.items()}
    launch(saved, folder)

    def job(name: str, source: str, layout: str, change: dict[str, Any]) -> Job:
        checkpoint = folder / source / f"checkpoint-{SAVED_AT}"
        return Job(layout, str(folder / f"to-{name}"), str(checkpoint), **change)

    jobs = {change: job(change, "stock", "stock", settings) for change, settings in CHANGES.items()}
    for name, (source, layout) in RIGHT.items():
        jobs[name] = job(name, source, layout, CHANGES[name.partition("-")[0]])
    for name, (change, source, layout, _) in REFUSED.items():
        jobs[name] = job(name, source, layout, change)
    return launch({name: job for name, job in jobs.items() if with_rest or name not in REST}, folder)


@pytest.mark.parametrize("name", marked(RIGHT))
def test_a_changed_run_goes_on_as_a_stock_one(name: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    change = name.partition("-")[0]
    mine, stock = runs[name][0], runs[change][0]
    assert mine["error"] is stock["error"] is None, (mine["error"], stock["error"])
    assert len(mine["logs"]) == len(stock["logs"]) > 1
    tolerance = 2e-2 if change == "half" else 1e-5
    for here, there in zip(mine["logs"], stock["logs"], strict=True):
        assert here == pytest.approx(there, rel=tolerance, abs=tolerance)
    if change == "half" and mine["start"].keys() == stock["start"].keys():
        assert mine["start"] == pytest.approx(stock["start"], rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("name", marked(REFUSED))
def test_what_does_not_fit_is_refused_in_the_same_words(name: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    said = [rank["error"] for rank in runs[name]]
    assert len(set(said)) == 1, said
    assert said[0] is not None
    assert REFUSED[name][3] in said[0]
    assert all(rank["logs"] == [] for rank in runs[name])
