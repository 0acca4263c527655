"""One run of a Trainer for each value that a user may give a field of TrainingArguments; what must agree comes back."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = {**SAVES, "load_best_model_at_end": True}
REGROUPED = tuple({"per_device_train_batch_size": 8 // n, "gradient_accumulation_steps": n} for n in (1, 4, 8))
CLOCKS = ("runtime", "per_second", "_mem_", "total_flos", "monitor/")


@dataclasses.dataclass(frozen=True)
class Row:
    """A value of a field, and what else the run needs for the field to matter.

    Attributes:
        arguments: Handed to TrainingArguments; the field and its value come first.
        metrics: "", or how `compute_metrics` is called: "whole", "lists", "batches".
        resume: Whether a second Trainer goes on from checkpoint-2.
        noise: In reduced precision, arguments with which one process gives another rounding of the same numbers.
        other_draws: Layouts that draw other random numbers, and say so.
        even: Rows of one length, without which stock replicas fail.
    """

    name: str
    arguments: dict[str, Any]
    metrics: str = ""
    resume: bool = False
    noise: tuple[dict[str, Any], ...] = ()
    other_draws: frozenset[str] = frozenset()
    even: bool = False


def _each(field: str, *values: Any, **more: Any) -> list[Row]:
    return [Row(f"{field}={json.dumps(value)}", {field: value, **more}) for value in values]


EVALUATION = [
    Row("eval_accumulation_steps=1", {"eval_accumulation_steps": 1}, "whole"),
    Row("eval_do_concat_batches=False", {"eval_do_concat_batches": False}, "lists"),
    Row("batch_eval_metrics=True", {"batch_eval_metrics": True}, "batches"),
    Row("include_for_metrics", {"include_for_metrics": ["inputs", "loss"]}, "whole"),
    Row("prediction_loss_only=True", {"prediction_loss_only": True}, "whole"),
    Row("eval_use_gather_object=True", {"eval_use_gather_object": True}, "whole"),
    Row("label_names", {"label_names": ["labels"]}, "whole"),
    Row("label_names of two", {"label_names": ["labels", "input_ids"]}, "pair"),
    *(
        Row(f"{name}=True", {name: True}, "whole", noise=({name: False},))
        for name in ("bf16_full_eval", "fp16_full_eval")
    ),
    *_each("eval_delay", 2, 2.5),
    *_each("eval_on_start", True),
    *_each("per_device_eval_batch_size", 3),
    *_each("eval_steps", 0.5, 1),
    *_each("eval_strategy", "no", "epoch"),
    *_each("include_num_input_tokens_seen", "all", "non_padding"),
]
LOADERS = (
    "split_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
)
DATA = [
    *_each("dataloader_drop_last", True, max_steps=-1, num_train_epochs=1),
    *_each("train_sampling_strategy", "group_by_length", "batch_rebalance", "sequential"),
    *_each("length_column_name", "long", train_sampling_strategy="group_by_length"),
    *_each("dataloader_num_workers", 1),
    *_each("dataloader_persistent_workers", True, dataloader_num_workers=1),
    *_each("dataloader_prefetch_factor", 2, dataloader_num_workers=1),
    *_each("dataloader_multiprocessing_context", "fork", dataloader_num_workers=1),
    *_each("dataloader_in_order", False, dataloader_num_workers=1),
    *_each("dataloader_pin_memory", True),
    *_each("remove_unused_columns", False),
    *_each("data_seed", 7),
    *_each("seed", 7),
    *_each("auto_find_batch_size", True),
    Row(
        "dispatch_batches", {"accelerator_config": {"dispatch_batches": True}, "dataloader_drop_last": True}, even=True
    ),
    # Without even batches replicas of stock wait for one that has no batch any more, unless incomplete rounds are left out.
    *(
        row
        for name in LOADERS
        for row in _each(
            "accelerator_config", {name: name not in LOADERS[1:3]}, dataloader_drop_last=name == LOADERS[1]
        )
    ),
    *_each("accelerator_config", {"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}),
    *_each("num_train_epochs", 1.5, 1, max_steps=-1),
    *_each("gradient_accumulation_steps", 1, 3, max_steps=-1, num_train_epochs=2),
    *_each("per_device_train_batch_size", 3),
]
SAVING = [
    Row("save_only_model=True", {"save_only_model": True, **SAVES}, resume=True),
    Row("ignore_data_skip=True", {"ignore_data_skip": True, **SAVES}, resume=True),
    Row("restore_callback_states", {"restore_callback_states_from_checkpoint": True, **SAVES}, resume=True),
    Row("save_steps=2", SAVES, resume=True),
    *_each("save_total_limit", 1, save_strategy="steps", save_steps=1),
    *_each("load_best_model_at_end", True, **SAVES),
    *_each("metric_for_best_model", "eval_loss", **BEST),
    Row("metric_for_best_model=rows", {"metric_for_best_model": "rows", "greater_is_better": True, **BEST}, "whole"),
    *_each("greater_is_better", True, metric_for_best_model="loss", **BEST),
    *_each("save_strategy", "epoch", "no"),
    *_each("save_strategy", "best", metric_for_best_model="loss"),
    *_each("save_steps", 0.5, save_strategy="steps"),
    *_each("save_on_each_node", True, **SAVES),
    Row("optim=schedule_free_adamw, resumed", {"optim": "schedule_free_adamw", **SAVES}, resume=True),
    *_each("enable_jit_checkpoint", True, **SAVES),
]
OPTIMIZERS = [
    *_each("optim", "adamw_torch", "adamw_torch_fused", "sgd", "adagrad"),
    # Without a floor in its epsilon RMSprop makes whole steps of the rounding of small gradients: small ones.
    *_each("optim", "rmsprop", learning_rate=1e-4),
    *_each("optim", "adafactor", learning_rate=1e-3),
    *_each("optim", "adamw_bnb_8bit", "paged_adamw_32bit", "lion_32bit", "rmsprop_bnb", "ademamix"),
    *_each("optim", "galore_adamw", optim_target_modules=["attn"], optim_args="rank=4"),
    *_each("optim", "lomo", "schedule_free_adamw", "stable_adamw", "grokadamw", "adamw_torch_8bit", "apollo_adamw"),
    *_each("optim_args", "momentum=0.9", optim="sgd"),
    *_each("max_grad_norm", 0, 0.1),
    *_each("weight_decay", 0.1),
    *_each("adam_beta1", 0.8),
    *_each("adam_beta2", 0.95),
    *_each("adam_epsilon", 1e-4),
    *_each("learning_rate", 1e-2),
    *_each("warmup_steps", 2, 0.5),
    *_each("lr_scheduler_type", "cosine", "constant", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau"),
    *_each("lr_scheduler_kwargs", {"min_lr": 1e-5}, lr_scheduler_type="cosine_with_min_lr"),
    *_each("label_smoothing_factor", 0.1),
    *_each("average_tokens_across_devices", False),
    Row("neftune_noise_alpha=5.0", {"neftune_noise_alpha": 5.0}, other_draws=frozenset({"pp2"})),
]
RUNNING = [
    *(Row(f"{name}=true", {name: True}, noise=REGROUPED) for name in ("bf16", "fp16")),
    *_each("tf32", True),
    *_each("torch_compile", True, torch_compile_backend="aot_eager"),
    *_each("torch_compile_mode", "default", torch_compile_backend="aot_eager"),
    *_each("torch_empty_cache_steps", 1),
    *_each("use_liger_kernel", True),
    *_each("gradient_checkpointing", True),
    *_each("activation_checkpointing", True),
    *_each("gradient_checkpointing_kwargs", {"use_reentrant": True}, gradient_checkpointing=True),
    *_each("activation_checkpointing_kwargs", {"use_reentrant": False}, activation_checkpointing=True),
    *_each("use_cache", True),
    *_each("logging_first_step", True, logging_steps=3),
    *_each("logging_steps", 2, 0.5),
    *_each("logging_strategy", "epoch", "no"),
    *_each("logging_nan_inf_filter", False),
    *_each("log_level", "info"),
    *_each("log_level_replica", "error"),
    *_each("log_on_each_node", False),
    *_each("disable_tqdm", False),
    *_each("report_to", ["none"], "all"),
    *_each("run_name", "mine"),
    *_each("skip_memory_metrics", False),
    *_each("debug", "underflow_overflow"),
    *_each("full_determinism", True),
    *_each("do_train", True),
    *_each("ddp_find_unused_parameters", True, False),
    *_each("ddp_broadcast_buffers", False, True),
    *_each("ddp_static_graph", True),
    *_each("ddp_bucket_cap_mb", 5),
    *_each("ddp_timeout", 600),
    *_each("ddp_backend", "gloo"),
    *_each("fsdp_config", {"min_num_params": 0}),
]
ROWS = {row.name: row for row in (*EVALUATION, *DATA, *SAVING, *OPTIMIZERS, *RUNNING)}


class Counting(TrainerCallback):
    """A callback with a state, as early stopping has one."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


class Metrics:
    """Sums of what `compute_metrics` is given, in each of the forms it is given in."""

    def __init__(self, kind: str) -> None:
        self.kind, self.sums = kind, [0.0, 0.0, 0.0]

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        guesses, labels = prediction.predictions, prediction.label_ids
        labels = labels[0] if self.kind == "pair" else labels
        pairs = list(zip(guesses, labels, strict=True)) if self.kind == "lists" else [(guesses, labels)]
        for logits, given in pairs:
            best, given = torch.as_tensor(logits).argmax(-1)[:, :-1], torch.as_tensor(given)[:, 1:]
            kept = given != -100
            self.sums[0] += len(given)
            self.sums[1] += float(((best == given) & kept).sum())
            self.sums[2] += float(torch.as_tensor(logits)[:, :-1][kept].double().square().sum())
        if prediction.inputs is not None:
            self.sums[1] += float(torch.as_tensor(prediction.inputs).clamp(min=0).sum())
        if prediction.losses is not None:
            self.sums[2] += float(torch.as_tensor(prediction.losses).double().sum())
        if self.kind == "batches" and not compute_result:
            return {}
        rows, hits, square = self.sums
        self.sums = [0.0, 0.0, 0.0]
        return {"rows": rows, "hits": hits, "square": math.sqrt(square)}


def data(count: int, even: bool) -> Dataset:
    """Rows, with two columns that the model does not take."""
    rows = tiny.rows(count, not even)
    return Dataset.from_list([{**row, "long": len(row["input_ids"]), "note": index} for index, row in enumerate(rows)])


def trainer_of(row: Row, model: str, parallel: dict[str, Any] | None, world_size: int, folder: Path) -> Trainer:
    """A Trainer whose steps have two accumulated batches of four rows, over all replicas."""
    share = (parallel or {}).get("pp_size", 1) * (parallel or {}).get("tp_size", 1)
    replicas = world_size // share
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        # GPT-2's biases begin at zero: they are nothing but their updates, and Adam divides noise of gradients near zero.
        "adam_epsilon": 1e-3 if model == "gpt2" else 1e-5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        **row.arguments,
    }
    if world_size == 1:  # stock would look for a process group
        settings = {name: value for name, value in settings.items() if not name.startswith("ddp_")}
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        settings[name] = max(1, settings[name] // replicas)
    callbacks: list[TrainerCallback] = [Counting()]
    if parallel is not None:
        from hf_parallel import HFParallelCallback

        callbacks.append(HFParallelCallback({}, **parallel))
    built = tiny.llama(layers=2) if model == "llama" else tiny.MODELS[model]()
    return Trainer(
        model=built,
        args=TrainingArguments(str(folder), **settings),
        train_dataset=data(26, row.even),
        eval_dataset=data(8 if row.even else 10, row.even),
        data_collator=tiny.collate,
        callbacks=callbacks,
        compute_metrics=Metrics(row.metrics) if row.metrics else None,
    )


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """The history of a run without its clocks, and what a parallel run measures of itself."""
    return [
        {key: value for key, value in entry.items() if not any(clock in key for clock in CLOCKS)}
        for entry in trainer.state.log_history
    ]


def seen(trainer: Trainer) -> int:
    """Optimizer steps of this Trainer, or of those before it that its callback remembers."""
    return next(each.seen for each in trainer.callback_handler.callbacks if isinstance(each, Counting))


def run_row(row: Row, model: str, parallel: dict[str, Any] | None, world_size: int, folder: Path) -> dict[str, Any]:
    """Train as a row says; what must agree, or who refused it and how."""
    trainer = None
    try:
        trainer = trainer_of(row, model, parallel, world_size, folder)
        trainer.train()
        if row.resume:
            first, trainer = trainer, trainer_of(row, model, parallel, world_size, folder)
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(0.5)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            del first
        trainer.save_model(str(folder / "final"))
        predicted = trainer.predict(data(8 if row.even else 6, row.even)).metrics["test_loss"]
    except Exception as error:
        ours = type(error).__module__.startswith("hf_parallel.")
        return {
            "refused": f"{type(error).__name__}: {error}",
            "ours": ours,
            "steps": 0 if trainer is None else seen(trainer),
        }
    finally:
        session = getattr(getattr(trainer, "accelerator", None), "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()
    state = trainer.state
    return {
        "history": logged(trainer),
        "steps": [state.global_step, state.epoch, state.max_steps, state.num_train_epochs],
        "best": [os.path.basename(state.best_model_checkpoint or ""), state.best_metric],
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint-*")),
        "seen": seen(trainer),
        "tokens": state.num_input_tokens_seen,
        "predicted": predicted,
        "weights": str(folder / "final" / "model.safetensors"),
    }


def rows_main(
    rank: int, world_size: int, jobs: list[tuple[Row, str, str, dict[str, Any] | None]], folder: str
) -> list[dict[str, Any]]:
    """(row, model, layout, settings) of each run; what it gives on this rank."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have workers
    multiprocessing.set_start_method("fork", force=True)  # of loaders: others import torch anew, half a minute a run
    found = []
    for row, model, layout, parallel in jobs:
        place = Path(folder) / layout / model / re.sub(r"\W+", "_", row.name)
        place.mkdir(parents=True, exist_ok=True)
        deterministic = torch.are_deterministic_algorithms_enabled()
        found.append(run_row(row, model, parallel, world_size, place))
        torch.use_deterministic_algorithms(deterministic)
    return found
