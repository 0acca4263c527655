"""One training run of the parity table, described by data: the same function runs it on one process and on a mesh."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments


ENV = {"ACCELERATE_USE_CPU": "true"}

# A key bias shifts all scores of a query alike: its true gradient is zero, and AdamW would blow its rounding noise up to
# whole steps. A larger epsilon keeps such noise small; everything else still moves.
NO_NOISE = {"adam_epsilon": 1e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run. `batch` is the global batch size of one forward over all replicas."""

    name: str
    model: str = "llama"
    steps: int = 6
    batch: int = 8
    accumulation: int = 1
    count: int = 64
    variable_length: bool = False
    clip: float = 0.5
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    user_optimizer: bool = False
    loss: str = ""  # "", "func", "func_mean", "subclass", "penalty"
    metrics: bool = False
    evaluate: bool = False
    save: bool = False
    resume_at: int = 0
    eval_count: int = 37
    parallel: dict[str, Any] | None = dataclasses.field(default_factory=dict)  # None: stock data parallelism
    device: str = "cpu"
    reference: int = 1  # processes of the stock run it must equal
    delay: int = 0  # updates by which the stock run's gradients are made of older weights
    delay_split: tuple[int, ...] | None = None  # blocks of each stage, if these have delays of their own


def compute_loss_func(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].float().reshape(-1, tiny.VOCAB)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def mean_loss_func(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].float().reshape(-1, tiny.VOCAB)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100)


class LossOnLogits(Trainer):
    """A user's subclass with a loss of its own on the logits."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = compute_loss_func(outputs, labels, num_items_in_batch)
        loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss


class Penalised(Trainer):
    """A penalty on all weights, as a user writes it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.model.parameters())
        return (loss, outputs) if return_outputs else loss


def accuracy(prediction: Any) -> dict[str, float]:
    guesses = torch.as_tensor(prediction.predictions).argmax(-1)[:, :-1]
    labels = torch.as_tensor(prediction.label_ids)[:, 1:]
    kept = labels != -100
    return {"accuracy": ((guesses == labels) & kept).sum().item() / kept.sum().item(), "rows": float(len(labels))}


class Snapshots(TrainerCallback):
    """Writes, whole and by name, the gradients of the first optimizer step and the parameters after the third."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.write("gradients", model, lambda p: p.grad.plain() if hasattr(p.grad, "plain") else p.grad)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.write("parameters", model, lambda p: p.detach())

    def write(self, name: str, model: Any, pick: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> None:
        session = getattr(self.trainer.accelerator, "hf_parallel", None) if self.trainer else None
        if session is not None:
            session.engine.gradients.replicas.synchronise()  # parameters may still be arriving
        with torch._C.DisableTorchFunction():  # a callback sees sizes of the whole, this looks at what the rank has
            held = self.held(name, model, session, pick)
            if held and self.trainer.args.should_save:
                self.folder.mkdir(parents=True, exist_ok=True)
                save_file({key: tensor.clone() for key, tensor in held.items()}, self.folder / f"{name}.safetensors")

    def held(self, name: str, model: Any, session: Any, pick: Callable[[Any], torch.Tensor | None]) -> Any:
        """Whole tensors by name; on rank 0."""
        named = dict(model.named_parameters()) if session is None else session.engine.attachment.parameters
        held = {key: tensor for key, p in named.items() if (tensor := pick(p)) is not None}
        if session is None:
            return held
        zero = session.engine.gradients.replicas.zero
        if zero is not None and name == "gradients":
            held = zero_gradients(zero)
        from hf_parallel.checkpoints.weights.gather import gather_tensors

        ledger = session.engine.attachment.ledger
        mine = {key for key, p in named.items() if name == "gradients" and not p.requires_grad}
        everyone: list[Any] = [mine]
        if session.mesh.shape.world_size > 1:
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, mine)  # stages hold different ones
        frozen = set().union(*everyone)
        return gather_tensors(
            ledger, held, session.mesh, wanted=lambda entry: entry.kind == "param" and entry.name not in frozen
        )


class Delayed(TrainerCallback):
    """The one-process run of an asynchronous schedule: W(t + 1) = W(t) - f(gradient of window t at W(t - delay)).

    With a split each stage has a delay of its own, the last none (PipeDream without vertical sync).
    """

    def __init__(self, delay: int, split: Sequence[int] | None = None) -> None:
        self.versions: deque[dict[str, torch.Tensor]] = deque(maxlen=delay + 1)
        self.delay, self.split = delay, split

    def delay_of(self, name: str) -> int:
        if self.split is None:
            return self.delay
        block = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        ends = list(itertools.accumulate(self.split))
        stage = bisect.bisect_right(ends, int(block[1])) if block else (0 if "emb" in name or "wte" in name else -1)
        return list(range(len(self.split) - 1, -1, -1))[stage]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.versions.clear()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.load(model, self.delay_of)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.load(model, lambda name: 0)

    @torch.no_grad()
    def load(self, model: Any, delay_of: Callable[[str], int]) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(self.versions[max(0, len(self.versions) - 1 - delay_of(name))][name])


def zero_gradients(zero: Any) -> dict[str, torch.Tensor]:
    """The whole gradient of every partitioned parameter; collective."""
    found = {}
    for shard in zero.shards:
        whole = shard.master.grad
        if shard.sharers is not None:
            parts = [torch.empty_like(shard.master) for _ in range(shard.sharers.size())]
            torch.distributed.all_gather(parts, shard.master.grad, group=shard.sharers)
            whole = torch.cat(parts)
        for key, param, start in zip(shard.bucket.names, shard.bucket.params, shard.bucket.offsets, strict=True):
            found[key] = whole[start : start + param.numel()].view_as(param)
    return found


def make_trainer(case: Case, folder: Path, world_size: int, extra: list[TrainerCallback] | None = None) -> Trainer:
    model = tiny.MODELS[case.model]()
    parallel = case.parallel or {}
    mesh = parallel.get("pp_size", 1) * parallel.get("tp_size", 1) * parallel.get("sp_size", 1)
    replicas = max(1, world_size // mesh)
    data = tiny.rows(case.count, case.variable_length)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=case.batch // replicas,
        per_device_eval_batch_size=case.batch // replicas,
        gradient_accumulation_steps=case.accumulation,
        max_steps=case.steps,
        logging_steps=1,
        learning_rate=1e-3,
        max_grad_norm=case.clip,
        weight_decay=0.1,
        use_cpu=case.device == "cpu",
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="linear",
        dataloader_pin_memory=case.device != "cpu",
        save_strategy="steps" if case.save else "no",
        save_steps=2,
        eval_strategy="steps" if case.evaluate else "no",
        eval_steps=2,
        **case.arguments,
    )
    options: dict[str, Any] = {}
    if case.loss in ("func", "func_mean"):
        options["compute_loss_func"] = compute_loss_func if case.loss == "func" else mean_loss_func
    if case.metrics:
        options["compute_metrics"] = accuracy
    if case.user_optimizer:
        options["optimizers"] = (torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), None)
    callbacks = list(extra or [])
    if case.delay and case.parallel is None:
        callbacks.append(Delayed(case.delay, case.delay_split))
    if world_size > 1 and case.parallel is not None:
        from hf_parallel import HFParallelCallback

        callbacks.append(HFParallelCallback({}, **case.parallel))
    kind = {"subclass": LossOnLogits, "penalty": Penalised}.get(case.loss, Trainer)
    return kind(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=tiny.rows(case.eval_count, case.variable_length),
        data_collator=tiny.collate,
        callbacks=callbacks,
        **options,
    )


def change_batches(trainer: Trainer, batches: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """After the first `batches`."""
    genuine, count = trainer.data_collator, iter(range(batches))

    def collate(features: list[Any]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = genuine(features)
        if next(count, None) is None:
            change(batch)
        return batch

    trainer.data_collator = collate


def at_step(
    trainer: Trainer, where: str, act: Callable[[], None], step: int, batches: int, layer: str = "mlp"
) -> None:
    """Do `act` in a step: in a pass of the first layer whose name ends so, or in a callback; or in the collator, after `batches`."""

    class Arm(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step != step:
                return
            found = next(module for name, module in model.named_modules() if name.endswith(layer))
            if where == "forward":
                found.register_forward_pre_hook(lambda *inputs: act())
            elif where == "backward":
                found.register_forward_hook(lambda *passed: passed[-1].register_hook(lambda gradient: act()) and None)
            elif where == "callback":
                act()

    trainer.add_callback(Arm())
    if where == "collator":
        change_batches(trainer, batches, lambda batch: act())


def run_case(case: Case, folder: Path, world_size: int) -> dict[str, Any]:
    """Train, and return what parity compares: losses, norms, metrics, and the weights of the exported checkpoint."""
    snapshots = Snapshots(folder)
    trainer = snapshots.trainer = make_trainer(case, folder, world_size, [snapshots])
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{case.resume_at}") if case.resume_at else None)
    return finished(trainer, folder)


def finished(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Save the model of a run that has ended, and say what it logged."""
    history = trainer.state.log_history
    trainer.save_model(str(folder / "final"))
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    keys = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_rows", "learning_rate")
    counts = getattr(trainer.model, "get_nb_trainable_parameters", None)
    return {
        "folder": str(folder),
        "history": [{key: entry[key] for key in keys if key in entry} for entry in history],
        "counts": list(counts()) if counts is not None else None,
    }


def ranks_main(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(run_case(case, Path(folder) / case.name, world_size))) for case in cases]


def run_cases(cases: list[Case], world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run all cases in one launch; what rank 0 returned, by name. Stock runs that differ in their names alone run once."""
    alike = [case.name if case.parallel is not None else repr(dataclasses.replace(case, name="")) for case in cases]
    distinct: dict[str, Case] = {}
    for key, case in zip(alike, cases, strict=True):
        distinct.setdefault(key, case)
    results = run_ranks(
        ranks_main,
        world_size,
        list(distinct.values()),
        str(folder),
        tmp_path=folder,
        timeout=400,
        init_group=world_size > 1,
        env=ENV,
    )
    found = dict(zip(distinct, results[0], strict=True))
    return {case.name: found[key] for case, key in zip(cases, alike, strict=True)}


def stock(case: Case) -> Case:
    """The run it must equal: no callback, on one process or under stock DDP."""
    return dataclasses.replace(case, name=f"stock_{case.name}", parallel=None)


def run_all(made: dict[int, list[Case]], folder: Path) -> dict[str, dict[str, Any]]:
    """One launch a world size, and the stock runs."""
    found = run_cases([stock(case) for cases in made.values() for case in cases], 1, folder / "world1")
    for world_size, cases in made.items():
        found |= run_cases(cases, world_size, folder / f"world{world_size}")
    return found


def wanted_cases(request: pytest.FixtureRequest, cases: list[Case]) -> list[Case]:
    """Those of `cases` whose tests of this file run: `-k` may have chosen one, and `-m` has left out the slow ones."""
    items: list[Any] = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    names = {item.callspec.params["case"].name for item in items if "case" in item.callspec.params}
    return [case for case in cases if case.name in names]


def runs_and_references(
    main: Callable[..., list[Any]], cases: dict[str, tuple[int, str, str, dict[str, Any]]], folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `main` returns for each case (processes, model, kind, settings), and on one process for each model and kind."""

    def launched(world_size: int, names: list[tuple[str, str, str, Any]], place: Path) -> dict[str, Any]:
        options: dict[str, Any] = {"tmp_path": place, "timeout": 250, "init_group": world_size > 1, "env": ENV}
        results = run_ranks(main, world_size, names, str(place), **options)
        return dict(zip([name for name, *_ in names], results[0], strict=True))

    kinds = sorted({(model, kind) for _, model, kind, _ in cases.values()})
    references = launched(1, [(f"{model}-{kind}", model, kind, {}) for model, kind in kinds], folder / "references")
    found: dict[str, Any] = {}
    for world_size in (2, 4):
        names = [(name, *case[1:]) for name, case in cases.items() if case[0] == world_size]
        found |= launched(world_size, names, folder / "runs")
    return found, references


def compare(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    assert mine["counts"] == reference["counts"], "trained parameters, and all"
    assert len(mine["history"]) == len(reference["history"])
    for step, (here, there) in enumerate(zip(mine["history"], reference["history"], strict=True)):
        assert here.keys() == there.keys()
        for key, value in there.items():
            assert here[key] == pytest.approx(value, abs=1e-5), f"{key} of log {step}"
    for file in ("gradients.safetensors", "parameters.safetensors"):
        tensors, expected = (load_file(Path(run["folder"]) / file) for run in (mine, reference))
        assert tensors.keys() == expected.keys(), file
        for name, tensor in expected.items():
            difference = float((tensors[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
            assert difference <= 1e-5, f"{file}: {name} differs by {difference:.1e} relative"
