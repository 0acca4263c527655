"""Trainer features as functions: each runs on one process, under stock DDP or on a mesh, and returns what must agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from datasets import Dataset
from datasets import IterableDataset as HubIterable
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalPrediction


LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_score", "num_input_tokens_seen")


@dataclass
class Run:
    """Where and how a feature runs. `parallel` None is the stock Trainer."""

    folder: Path
    parallel: dict[str, Any] | None
    world_size: int

    def callback(self) -> TrainerCallback:
        from hf_parallel import HFParallelCallback

        return HFParallelCallback({}, **(self.parallel or {}))

    def trainer(
        self,
        *,
        model: Any = None,
        arguments: dict[str, Any] | None = None,
        kind: type[Trainer] = Trainer,
        callbacks: list[TrainerCallback] | None = None,
        batch: int = 8,
        shared: TrainingArguments | None = None,
        **options: Any,
    ) -> Trainer:
        """A Trainer on tiny data whose global batch is `batch` rows; parallel if this run is."""
        parallel = self.parallel or {}
        replicas = self.world_size // (parallel.get("pp_size", 1) * parallel.get("tp_size", 1))
        settings = {
            "per_device_train_batch_size": batch // replicas,
            "per_device_eval_batch_size": batch // replicas,
            "max_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "max_grad_norm": 0.5,
            # Adam blows rounding noise in elements without a gradient up to whole steps; this keeps it small.
            "adam_epsilon": 1e-5,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "save_strategy": "no",
            **(arguments or {}),
        }
        chosen = list(callbacks or [])
        if self.parallel is not None and "config" not in options:
            chosen.append(self.callback())
        if "model_init" not in options:
            options["model"] = tiny.llama() if model is None else model
        options.setdefault("train_dataset", Dataset.from_list(tiny.rows(48, True)))
        options.setdefault("eval_dataset", Dataset.from_list(tiny.rows(37, True)))
        return kind(
            args=shared or TrainingArguments(str(self.folder), **settings),
            data_collator=tiny.collate,
            callbacks=chosen,
            **options,
        )


def logs(trainer: Trainer, start: int = 0) -> list[dict[str, float]]:
    return [{k: e[k] for k in LOGGED if k in e} for e in trainer.state.log_history if e["step"] > start]


def weights(trainer: Trainer, folder: Path) -> str:
    """Save the whole model; the comparison reads the file."""
    trainer.save_model(str(folder))
    return f"weights:{folder / 'model.safetensors'}"


def array(value: Any, path: Path) -> str:
    """Save an array of this rank; the comparison reads rank 0's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.asarray(value))
    return f"array:{path}"


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and a checksum of the guesses; accepts logits or the guesses that `keep_guesses` leaves."""
    guesses, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    guesses = guesses.argmax(-1) if guesses.ndim == 3 else guesses
    kept = labels[:, 1:] != -100
    found = {
        "accuracy": float(((guesses[:, :-1] == labels[:, 1:]) & kept).sum() / kept.sum()),
        "guesses": int((guesses[:, :-1] * kept).sum()),
        "rows": len(labels),
    }
    if prediction.inputs is not None:
        found["inputs"] = int(torch.as_tensor(prediction.inputs).clamp(min=0).sum())
    return found


def keep_guesses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


class Scores:
    """Metric values known beforehand: the second evaluation is the best."""

    def __init__(self, *values: float) -> None:
        self.left = list(values)

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        return {"score": self.left.pop(0)}


# -- checkpoints -----------------------------------------------------------------------------------------------------


def resume(run: Run) -> Any:
    """Six steps at once, and six interrupted at four (in the middle of the second epoch), dropout on."""
    options = {
        "arguments": {
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 4,
            "lr_scheduler_type": "cosine",
            "gradient_accumulation_steps": 2,
        },
        "batch": 4,
        "train_dataset": Dataset.from_list(tiny.rows(24, True)),
    }
    straight = run.trainer(model=tiny.llama(tied=True, attention_dropout=0.2), **options)
    straight.train()
    other = tiny.llama(tied=True, attention_dropout=0.2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    resumed = run.trainer(model=other, **options)
    resumed.train(resume_from_checkpoint=str(run.folder / "checkpoint-4"))
    return {
        "straight": [logs(straight, 4), weights(straight, run.folder / "straight")],
        "resumed": [logs(resumed, 4), weights(resumed, run.folder / "resumed")],
    }


def checkpoint_files(run: Run) -> Any:
    """The exported folder equals what one process saves, name by name."""
    trainer = run.trainer(model=tiny.llama(tied=True), arguments={"max_steps": 2, "save_strategy": "epoch"})
    trainer.train()
    saved = weights(trainer, run.folder / "final")
    folders = [run.folder / "final", run.folder / "checkpoint-2"]
    tensors = load_file(folders[1] / "model.safetensors")
    loaded = type(tiny.llama()).from_pretrained(folders[1]).state_dict()
    return {
        "weights": saved,
        "keys": sorted(tensors),
        "dtypes": sorted({str(tensor.dtype) for tensor in tensors.values()}),
        "loaded": all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()),
        "files": sorted({path.name for folder in folders for path in folder.iterdir()}) if run.parallel else None,
        "tied": torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"]),
    }


def best_model(run: Run) -> Any:
    """Best of the metrics, early stopping one evaluation later, rotation that spares the best."""
    trainer = run.trainer(
        arguments={
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            "save_total_limit": 2,
            "learning_rate": 1e-2,
        },
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        compute_metrics=Scores(0.1, 0.5, 0.3, 0.2, 0.9),
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    return {
        "stopped": trainer.state.global_step,
        "best": [best.name, trainer.state.best_metric, trainer.state.best_global_step],
        "left": sorted(path.name for path in run.folder.glob("checkpoint-*")),
        "logs": logs(trainer),
        "final": weights(trainer, run.folder / "final"),
        "of_best": f"weights:{best / 'model.safetensors'}",
        "evaluated": trainer.evaluate(metric_key_prefix="test")["test_loss"],
    }


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluate_first(run: Run) -> Any:
    """evaluate() and predict() on a Trainer that never trained."""
    trainer = run.trainer(compute_metrics=accuracy)
    before = trainer.evaluate()
    found = trainer.predict(Dataset.from_list(tiny.rows(21, True)))
    return {
        "before": [before[key] for key in ("eval_loss", "eval_accuracy", "eval_guesses", "eval_rows")],
        "predict": [found.metrics["test_loss"], found.metrics["test_guesses"], found.metrics["test_rows"]],
        "predictions": array(found.predictions, run.folder / "predictions.npy"),
        "labels": array(found.label_ids, run.folder / "labels.npy"),
    }


def evaluate_then_train(run: Run) -> Any:
    trainer = run.trainer(eval_dataset=Dataset.from_list(tiny.rows(16)))
    trainer.evaluate()
    trainer.train()
    return [logs(trainer), weights(trainer, run.folder / "final")]


def metric_options(run: Run) -> Any:
    guesses = run.trainer(
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=keep_guesses,
        arguments={"eval_accumulation_steps": 2, "include_for_metrics": ["inputs", "loss"]},
    ).evaluate()
    seen: list[Any] = []

    def by_batch(prediction: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        seen.append(accuracy(prediction)["rows"])
        return {"rows": sum(seen), "batches": len(seen)} if compute_result else {}

    batches = run.trainer(compute_metrics=by_batch, arguments={"batch_eval_metrics": True}).evaluate()
    loss_only = run.trainer(arguments={"prediction_loss_only": True}).evaluate()
    keys = ("eval_loss", "eval_guesses", "eval_rows", "eval_inputs", "eval_batches")
    return [{key: found[key] for key in keys if key in found} for found in (guesses, batches, loss_only)]


# -- training arguments ----------------------------------------------------------------------------------------------


def bf16(run: Run) -> Any:
    trainer = run.trainer(arguments={"bf16": True})
    trainer.train()
    losses = [entry["loss"] for entry in logs(trainer) if "loss" in entry]
    return {"loss": losses, "eval": trainer.evaluate()["eval_loss"]}


def counting(run: Run) -> Any:
    """Token counters, batch size and throughput."""
    found = []
    for counted in ("all", "non_padding"):
        trainer = run.trainer(
            arguments={"include_num_input_tokens_seen": counted, "gradient_accumulation_steps": 2}, batch=4
        )
        metrics = trainer.train().metrics
        samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
        found.append(
            {
                "tokens": trainer.state.num_input_tokens_seen,
                "batch": trainer.get_total_train_batch_size(trainer.args),
                "samples": round(samples / 8),
                "epoch": trainer.state.epoch,
                "logs": logs(trainer),
            }
        )
    return found


def checkpointing(run: Run) -> Any:
    arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = run.trainer(arguments=arguments, model=tiny.llama(tied=True))
    trainer.train()
    return [logs(trainer), weights(trainer, run.folder / "final")]


def dropout(run: Run) -> Any:
    """Two runs with dropout."""
    found = []
    for name in ("first", "second"):
        trainer = run.trainer(model=tiny.llama(attention_dropout=0.3), arguments={"gradient_accumulation_steps": 2})
        trainer.train()
        found.append([logs(trainer), weights(trainer, run.folder / name)])
    assert found[0][0] != logs_without_dropout(run), "dropout had no effect"
    return {"first": found[0], "second": found[1]}


def logs_without_dropout(run: Run) -> list[dict[str, float]]:
    trainer = run.trainer(arguments={"gradient_accumulation_steps": 2})
    trainer.train()
    return logs(trainer)


def schedules(run: Run) -> Any:
    found = []
    for name, more in (
        ("cosine", {"warmup_steps": 2}),
        ("constant_with_warmup", {"warmup_steps": 3}),
        (
            "reduce_lr_on_plateau",
            {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}},
        ),
    ):
        trainer = run.trainer(arguments={"lr_scheduler_type": name, **more})
        trainer.train()
        found.append(logs(trainer))
    return found


def optimizers(run: Run) -> Any:
    """Built-in SGD and Adafactor, and a pair made by the user."""
    found = []
    for name in ("sgd", "adafactor", "user"):
        model = tiny.llama(tied=True)
        pair: tuple[Any, Any] = (None, None)
        arguments: dict[str, Any] = {"optim": name, "learning_rate": 1e-2}
        if name == "user":
            optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4)
            pair = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
            arguments = {}
        trainer = run.trainer(model=model, arguments=arguments, optimizers=pair)
        trainer.train()
        found.append([logs(trainer), weights(trainer, run.folder / name)])
    return found


# -- data ------------------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(tiny.rows(48, True))


def iterable(run: Run) -> Any:
    found = []
    for data in (Stream(), HubIterable.from_generator(tiny.rows, gen_kwargs={"count": 48, "variable_length": True})):
        trainer = run.trainer(train_dataset=data, arguments={"gradient_accumulation_steps": 2}, batch=4)
        trainer.train()
        found.append(logs(trainer))
    return found


# -- forms and subclasses --------------------------------------------------------------------------------------------


class Doubling(Trainer):
    """A user's subclass: doubles the learning signal and adds to the log."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs["labels"] = inputs["labels"].clone()
        return super().training_step(model, inputs, num_items_in_batch) * 2

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "eval_score": 3.0}, start_time)


def subclass(run: Run) -> Any:
    trainer = run.trainer(kind=Doubling)
    trainer.train()
    return logs(trainer)


def explicit(run: Run) -> Any:
    """HFParallelTrainer(config=...), a user's class over it, and a subclass of the callback."""
    if run.parallel is None:
        trainer = run.trainer()
        trainer.train()
        return [logs(trainer)] * 3
    from hf_parallel import HFParallelCallback, HFParallelTrainer

    class Mine(HFParallelTrainer):
        pass

    class Callback(HFParallelCallback):
        pass

    found = []
    for kind in (HFParallelTrainer, Mine):
        trainer = run.trainer(kind=kind, config=nested(run.parallel))
        trainer.train()
        found.append(logs(trainer))
    inner = Run(run.folder, run.parallel, run.world_size)
    inner.callback = lambda: Callback({}, **run.parallel)  # type: ignore[method-assign]
    trainer = inner.trainer()
    trainer.train()
    return [*found, logs(trainer)]


def nested(parallel: dict[str, Any]) -> dict[str, Any]:
    """Settings as a YAML file has them."""
    top = {key: value for key, value in parallel.items() if key.endswith("_size")}
    return {**top, "pipeline": {key: value for key, value in parallel.items() if key not in top}}


def again(run: Run) -> Any:
    """model_init, train() twice on one Trainer, and another Trainer with the same arguments after it."""
    made = run.trainer(model_init=lambda: tiny.llama(tied=True))
    made.train()
    trainer = run.trainer()
    trainer.train()
    first = logs(trainer)
    trainer.train()
    fresh = run.trainer(shared=trainer.args)
    fresh.train()
    return [logs(made), first, logs(trainer), logs(fresh), weights(trainer, run.folder / "twice")]


FEATURES: dict[str, Callable[[Run], Any]] = {
    function.__name__: function
    for function in (
        resume,
        checkpoint_files,
        best_model,
        evaluate_first,
        evaluate_then_train,
        metric_options,
        bf16,
        counting,
        checkpointing,
        dropout,
        schedules,
        optimizers,
        iterable,
        subclass,
        explicit,
        again,
    )
}


def features_main(rank: int, world_size: int, jobs: list[tuple[str, dict[str, Any] | None]], folder: str) -> list[Any]:
    """Run features one after the other; jobs are (feature, settings)."""
    found = []
    for index, (name, parallel) in enumerate(jobs):
        place = Path(folder) / f"{index}-{name}"
        found.append(json.loads(json.dumps(FEATURES[name](Run(place, parallel, world_size)))))
    return found
