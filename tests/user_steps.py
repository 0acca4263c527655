"""Trainers and loops as users write them: batches edited on the way, losses scaled and added up, parameters of a loss.

Each runs by name on one process and on a mesh; `run` says what it logged, and the whole weights it ended with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from hf_parallel.errors import ParallelError


ENV = {"ACCELERATE_USE_CPU": "true"}


def mask_tail(labels: torch.Tensor) -> None:
    labels[:, labels.shape[1] // 2 :] = -100


# -- batches edited on their way -------------------------------------------------------------------------------------


class Editing(Trainer):
    """Changes each batch in `training_step`, in place."""

    def edit(self, inputs: Any) -> Any:
        mask_tail(inputs["labels"])
        return inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, self.edit(inputs), num_items_in_batch)


class EditingSecond(Editing):
    calls = 0

    def edit(self, inputs: Any) -> Any:
        self.calls += 1
        return inputs if self.calls % 2 else super().edit(inputs)


class Replacing(Editing):
    def edit(self, inputs: Any) -> Any:
        labels = inputs["labels"].clone()
        mask_tail(labels)
        inputs["labels"] = labels
        return inputs


class Copying(Editing):
    def edit(self, inputs: Any) -> Any:
        return {**inputs, "labels": inputs["labels"].clone().masked_fill(inputs["labels"] % 3 == 0, -100)}


class ThroughNumpy(Editing):
    def edit(self, inputs: Any) -> Any:
        inputs["labels"].numpy()[:, :7] = -100
        return inputs


class ThroughView(Editing):
    def edit(self, inputs: Any) -> Any:
        inputs["labels"].view(-1)[::3] = -100
        return inputs


class Removing(Editing):
    def edit(self, inputs: Any) -> Any:
        inputs.pop("attention_mask")
        return inputs


class Preparing(Trainer):
    """Changes each batch when it is prepared."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        mask_tail(inputs["labels"])
        return inputs


class Prepared(Trainer):
    """Changes a batch in the stock loss's own way to the model, then lets the stock loss run."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask_tail(inputs["labels"])
        return super().compute_loss(model, inputs, *args, **kwargs)


def hooked(trainer: Trainer) -> None:
    """A hook of the model changes what it is called with."""

    def edit(module: Any, args: Any, kwargs: Any) -> Any:
        mask_tail(kwargs["labels"])
        return args, kwargs

    trainer.model.register_forward_pre_hook(edit, with_kwargs=True)


def replaced_step(trainer: Trainer) -> None:
    """The method of the object is replaced."""
    own = trainer.training_step

    def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask_tail(inputs["labels"])
        return own(model, inputs, *args, **kwargs)

    trainer.training_step = step  # type: ignore[method-assign]


def subclass_of_ours() -> type[Trainer]:
    """`HFParallelTrainer` as the base of a user's class, which then comes before our own methods."""
    from hf_parallel import HFParallelTrainer

    class Mine(HFParallelTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            mask_tail(inputs["labels"])
            return super().training_step(model, inputs, num_items_in_batch)

    return Mine


# -- losses scaled, added up and backpropagated by hand --------------------------------------------------------------


class TwoBackwards(Trainer):
    """The two halves of a batch, each with a backward of its own and a share of the loss."""

    shares = (0.5, 0.5)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs, total = self._prepare_inputs(inputs), 0.0
        for share, rows in zip(self.shares, (slice(0, None, 2), slice(1, None, 2)), strict=True):
            loss = model(**{name: value[rows] for name, value in inputs.items()}).loss * share
            loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


class UnequalBackwards(TwoBackwards):
    shares = (0.25, 0.6)


class ScaledByBatch(Trainer):
    """Every batch of a window has a weight of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss * (0.5 + float(inputs["input_ids"].sum() % 7) / 7)


class Unread(Trainer):
    """A training forward before the step whose loss nobody backpropagates."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        with torch.no_grad():
            model(**self._prepare_inputs(inputs))
        return loss


class Poisoned(Trainer):
    """One rank multiplies with a number that is none."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        return loss * float("nan") if self.args.process_index == 0 and self.state.global_step == 1 else loss


class PoisonedLogits(Trainer):
    """The same, with a loss on the logits."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        loss = on_logits(model(**inputs).logits, labels)
        return loss * float("nan") if self.args.process_index == 0 and self.state.global_step == 1 else loss


class UnlikeScales(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss * (1.0 + 0.01 * self.args.process_index)


class UnlikeLabels(Trainer):
    """Labels on the logits that differ from rank to rank: the batch that the model saw does not tell."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        if self.args.process_index:
            labels[0, 3] = 1 + (labels[0, 3] + 5) % 90
        return on_logits(model(**inputs).logits, labels)


# -- parameters that a loss reads by itself --------------------------------------------------------------------------


def on_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].float().reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100)


class Temperature(Trainer):
    """Logits are scaled by a parameter that no forward reads."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        return on_logits(model(**inputs).logits * model.temperature.exp(), labels)


class Weighted(Trainer):
    """The model's own loss, weighed by a parameter that no forward reads (an uncertainty weight)."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss * torch.exp(-model.temperature) + model.temperature


def with_temperature(model: Any) -> None:
    model.register_parameter("temperature", torch.nn.Parameter(torch.tensor(0.3)))


class Penalty(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + 0.01 * sum(p.square().sum() for p in model.parameters())


class PenaltyOnLogits(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        return on_logits(model(**inputs).logits, labels) + 0.01 * sum(p.norm() for p in model.parameters())


class TiedPenalty(Trainer):
    """Of the one matrix that both ranks hold."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + 0.01 * model.get_input_embeddings().weight.square().sum()


# -- ranks that draw for themselves ----------------------------------------------------------------------------------


class Drawing:
    """A collator that draws on rank 1 what rank 0 does not, from its 9th batch on: later than the first checks."""

    def __init__(self, name: str = "input_ids") -> None:
        self.name, self.count = name, 0

    def __call__(self, features: list[Any]) -> dict[str, torch.Tensor]:
        batch = tiny.collate(features)
        self.count += 1
        if self.count > 8 and torch.distributed.is_initialized() and torch.distributed.get_rank():
            batch[self.name][1, 2] = 5 + self.count % 7
        return batch


KINDS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    kind.__name__: (kind, {})
    for kind in (
        *(
            Trainer,
            Editing,
            EditingSecond,
            Replacing,
            Copying,
            ThroughNumpy,
            ThroughView,
            Removing,
            Preparing,
            Prepared,
        ),
        *(TwoBackwards, UnequalBackwards, ScaledByBatch, Unread, Poisoned, PoisonedLogits, UnlikeScales, UnlikeLabels),
        *(Penalty, PenaltyOnLogits, TiedPenalty),
    )
}
KINDS |= {
    "hooked": (Trainer, {"change": hooked}),
    "replaced_step": (Trainer, {"change": replaced_step}),
    "our_subclass": (Editing, {"form": subclass_of_ours}),
    "Temperature": (Temperature, {"prepare": with_temperature}),
    "Weighted": (Weighted, {"prepare": with_temperature}),
    "drawn_inputs": (Trainer, {"collator": Drawing}),
    "drawn_labels": (Trainer, {"collator": lambda: Drawing("labels")}),
}


def run(
    name: str,
    parallel: dict[str, Any] | None,
    folder: Path,
    *,
    model: str = "llama",
    accumulation: int = 2,
    steps: int = 3,
    rows: int = 8,
    arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train; the log and the exported weights, or the error."""
    kind, options = KINDS[name]
    made = tiny.MODELS[model]()
    options.get("prepare", lambda model: None)(made)
    callbacks = []
    given: dict[str, Any] = {}
    if parallel is not None and "form" in options:
        kind = options["form"]()
        given["config"] = {"pp_size": parallel["pp_size"]}
    elif parallel is not None:
        from hf_parallel import HFParallelCallback

        callbacks.append(HFParallelCallback({}, **parallel))
    trainer = kind(
        model=made,
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=steps,
            logging_steps=1,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            adam_epsilon=1e-5,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
            **(arguments or {}),
        ),
        train_dataset=tiny.rows(96, True),
        data_collator=options.get("collator", lambda: tiny.collate)(),
        callbacks=callbacks,
        **given,
    )
    options.get("change", lambda trainer: None)(trainer)
    error = None
    try:
        trainer.train()
        trainer.save_model(str(folder / "final"))
    except ParallelError as refused:
        error = f"{type(refused).__name__}: {refused}"
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    history = [{k: e[k] for k in ("loss", "grad_norm") if k in e} for e in trainer.state.log_history]
    done = trainer.state.global_step
    return {"folder": str(folder / "final"), "history": history, "error": error, "steps": done}


def many(
    rank: int, world_size: int, jobs: list[tuple[str, dict[str, Any] | None, dict[str, Any]]], folder: str
) -> Any:
    found = [run(name, parallel, Path(folder) / str(i), **options) for i, (name, parallel, options) in enumerate(jobs)]
    return json.loads(json.dumps(found))


def same(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    """Losses and norms to 1e-5, every parameter after the run to 1e-5 relative."""
    assert mine["error"] is None, mine["error"]
    assert len(mine["history"]) == len(reference["history"]) > 1
    for step, (here, there) in enumerate(zip(mine["history"], reference["history"], strict=True)):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-5), f"log {step}"
    tensors, expected = (load_file(Path(each["folder"]) / "model.safetensors") for each in (mine, reference))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((tensors[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        assert difference <= 1e-5, f"{name} differs by {difference:.1e} relative"


# Of one process, by kind, and of two, by job: what each rank found.
Runs = tuple[dict[Any, list[dict[str, Any]]], dict[Any, list[dict[str, Any]]]]


def launch(
    jobs: list[Any], world_size: int, folder: Path, many: Callable[..., Any] = many
) -> list[list[dict[str, Any]]]:
    """What each rank found, job by job; `many` is of the file that adds to `KINDS`, if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"tmp_path": folder, "timeout": 300, "init_group": world_size > 1, "env": ENV}
    by_rank = run_ranks(many, world_size, jobs, str(folder), **parts)
    return [list(found) for found in zip(*by_rank, strict=True)]


def launch_both(ones: dict[Any, Any], twos: dict[Any, Any], folder: Path, many: Callable[..., Any]) -> Runs:
    """Jobs of one process and of two, by name."""
    alone, together = (
        dict(zip(jobs, launch(list(jobs.values()), size, folder / str(size), many), strict=True))
        for size, jobs in ((1, ones), (2, twos))
    )
    return alone, together


def rows_on_two(parallel: dict[str, Any]) -> int:
    """Rows of a batch that each of two ranks is given, so that a step has as many as one of one process has."""
    return 8 if {"pp_size", "tp_size", "sp_size"} & parallel.keys() else 4


# Kind, settings, what an error says and after how many steps; no text where the run must be that of one process.
Jobs = dict[str, tuple[str, dict[str, Any], str, int]]


def runs_of(
    jobs: Jobs, folder: Path, many: Callable[..., Any], options: dict[str, dict[str, Any]] | None = None
) -> Runs:
    ones = {kind: (kind, None, {"rows": 8}) for kind, _, error, _ in jobs.values() if not error}
    twos = {
        job: (kind, parallel, {"rows": rows_on_two(parallel), **(options or {}).get(job, {})})
        for job, (kind, parallel, _, _) in jobs.items()
    }
    return launch_both(ones, twos, folder, many)


def check_job(jobs: Jobs, job: str, runs: Runs) -> None:
    """A run is that of one process, or each rank refused it in time."""
    ones, twos = runs
    kind, _, error, steps = jobs[job]
    if not error:
        same(twos[job][0], ones[kind][0])
        return
    for rank in twos[job]:
        assert error in str(rank["error"])
        assert rank["steps"] == steps
