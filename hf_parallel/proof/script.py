"""A user's own training script, run as it is for the first steps of its first training."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from hf_parallel.errors import UnsupportedError
from hf_parallel.proof.in_parts import compute_in_parts, sees_parts
from hf_parallel.proof.job import Job
from hf_parallel.proof.watch import EPS, Watch, perturb
from hf_parallel.trainer.callback import HFParallelCallback


DROPS = ("drop", "jitter")  # in names of attributes that are rates of dropout


class _Ended(BaseException):
    """The steps that are compared are trained: the rest of the script is not run. No `except Exception` stops it."""


def train_script(job: Job, folder: Path, *, layout: bool, perturbed: int = 0) -> None:
    """Run a script until the first training of its first Trainer is over, and leave in `folder` what is compared.

    Args:
        job: The job; it has a script.
        folder: Folder of this rank.
        layout: Whether this process is a rank of the layout; else it is the reference.
        perturbed: 0, or which perturbation at rounding level the weights get.

    Raises:
        UnsupportedError: The script cannot be verified.
    """
    if job.script is None:
        raise ValueError("the job has no script")
    script = Path(job.script).absolute()
    arguments, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *job.arguments], str(script.parent)
    try:
        with _watched(_Run(job, folder, layout, perturbed)):
            runpy.run_path(str(script), run_name="__main__")
    except _Ended:
        return
    except SystemExit as error:
        raise UnsupportedError(
            f"--script {job.script}: it ended with exit code {error.code} before it called Trainer.train(). Give the "
            "arguments that it needs with --script-args."
        ) from error
    finally:
        sys.argv, sys.path[:] = arguments, path
    raise UnsupportedError(
        f"--script {job.script}: it ended and never called Trainer.train(). A loop of its own cannot be verified: give the model "
        "instead of the script."
    )


class _Run:
    """One run of a script: what its first Trainer gets, and how it trains."""

    def __init__(self, job: Job, folder: Path, layout: bool, perturbed: int) -> None:
        self.job, self.folder, self.layout, self.perturbed = job, folder, layout, perturbed
        self.watch: Watch | None = None
        self.trainer: Trainer | None = None

    def given(self, trainer: Trainer, given: inspect.BoundArguments) -> None:
        """Change the arguments of the Trainer that is being made."""
        model, args, job = given.arguments.get("model"), given.arguments.get("args"), self.job
        if not isinstance(model, nn.Module):
            raise UnsupportedError(
                f"--script {job.script}: its Trainer gets no model but makes it itself (model_init). Give it model=..."
            )
        if args is None:
            raise UnsupportedError(f"--script {job.script}: its Trainer gets no TrainingArguments. Give it args=...")
        changing = [name for name in ("full_determinism", "auto_find_batch_size") if getattr(args, name, False)]
        if changing:
            raise UnsupportedError(
                f"--script {job.script}: its TrainingArguments have {' and '.join(f'{name}=True' for name in changing)}, which would make the "
                "compared runs train in different ways. Leave that out."
            )
        self._settle(args)
        _without_dropout(model)
        if self.perturbed:
            perturb(model, EPS["bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"], self.perturbed)
        sees = not self.layout and sees_parts(model)
        rows = args.per_device_train_batch_size // (1 if self.layout else job.replicas)
        parts = compute_in_parts(model, dataclasses.replace(job, script=None, rows=rows)) if sees else 1
        callbacks = list(given.arguments.get("callbacks") or ())
        sample = next((c.sample for c in callbacks if isinstance(c, HFParallelCallback)), None)
        others = [each for each in callbacks if not isinstance(each, HFParallelCallback)]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.watch = Watch(job, self.folder, model, layout=self.layout, sample=sample, parts=parts)
        given.arguments["callbacks"] = [*others, *self.watch.callbacks]
        self.trainer = trainer

    def _settle(self, args: Any) -> None:
        """Set a script's arguments: the steps to compare, no saving or evaluation, and as many rows of a step in one process."""
        args.max_steps, args.num_train_epochs = self.job.steps, 1e9
        args.logging_strategy, args.logging_steps, args.logging_nan_inf_filter = "steps", 1, False
        args.save_strategy, args.eval_strategy, args.load_best_model_at_end = "no", "no", False
        args.report_to, args.disable_tqdm, args.push_to_hub = [], True, False
        args.neftune_noise_alpha = None  # drawn otherwise in a layout, as dropout is
        args.warmup_steps = 0  # in which weights hardly move, so that an optimizer that goes wrong would not show
        args.dataloader_drop_last = (
            True  # replicas fill up a last batch with rows that one process does not train again
        )
        args.output_dir = str(self.folder / "output")
        if not self.layout:
            args.per_device_train_batch_size *= self.job.replicas

    def train(self, trainer: Trainer, train: Callable[[], Any]) -> None:
        """Train as the script asked, and end it."""
        if self.watch is None or trainer is not self.trainer:
            raise UnsupportedError(
                f"--script {self.job.script}: it trains with another Trainer than the first it made. Call train() on the first, or "
                "make no other before it."
            )
        self.watch.run(trainer, train)
        raise _Ended


@contextmanager
def _watched(run: _Run) -> Iterator[None]:
    """Inside, the first Trainer of this process is that of `run`."""
    make, train, prepare = Trainer.__init__, Trainer.train, HFParallelCallback.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(self: Trainer, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        if run.trainer is None:
            run.given(self, given)
        make(*given.args, **given.kwargs)

    @functools.wraps(train)
    def trained(self: Trainer, *args: Any, **kwargs: Any) -> None:
        run.train(self, lambda: train(self, *args, **kwargs))

    def of_script(self: HFParallelCallback, *args: Any, sample: Any = None, **kwargs: Any) -> None:
        """The script's own settings are not used: the layout is the job's."""
        self.sample = sample

    def of_layout(self: HFParallelCallback, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs) if args and args[0] == run.job.config else of_script(self, *args, **kwargs)

    places: list[tuple[Any, str, Any]] = [
        (Trainer, "__init__", made),
        (Trainer, "train", trained),
        (HFParallelCallback, "__init__", of_layout),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, function in places:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _without_dropout(model: nn.Module) -> None:
    """Masks are drawn otherwise in a layout, as they are in data parallelism."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for module in [*model.modules(), *configs.values()]:  # some forwards read the rate from the config
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(part in name for part in DROPS):
                setattr(module, name, 0.0)
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            module.p = 0.0
