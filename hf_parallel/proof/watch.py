"""Watches a Trainer so that its run can be compared: notes gradients, parameters and passages, and plants a bug if asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_parallel.errors import UnsupportedError
from hf_parallel.proof.compare import PERTURBED, REFERENCE
from hf_parallel.proof.job import Job
from hf_parallel.proof.record import BEFORE, Recorder
from hf_parallel.proof.ties import Ties, noise_of
from hf_parallel.proof.trace import Tracer
from hf_parallel.trainer.callback import HFParallelCallback


EPS = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
PIECE = 2**20  # elements of a gradient that are copied in fp64 at once
LOSS_SCALE = 2.0**8  # fp16: gradients of a tiny model stay finite, so no run skips a step


class Watch:
    """Watches one run of a job; made before the Trainer is.

    Args:
        job: The job.
        folder: Folder in which this process leaves what is compared.
        model: The model, before it is parallelized.
        layout: Whether this process is a rank of the layout; else it is the reference.
        sample: For `HFParallelCallback`.
        parts: Forwards that the reference makes of a batch.

    Attributes:
        callbacks: Callbacks that the Trainer gets, the layout's among them.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        model: nn.Module,
        *,
        layout: bool,
        sample: Any = None,
        parts: int = 1,
    ) -> None:
        self._folder, self._parts, self._model, self._is_layout = folder, parts, model, layout
        last = folder.name == f"perturbed{PERTURBED}"  # which is run again when the others have ended
        noise = noise_of(folder.parent / REFERENCE, folder.parent / "perturbed1") if last else ()
        self._ties = None if layout else Ties(noise)
        self._recorder = Recorder(folder, job.steps)
        self._tamper = _Tamper(job.tamper) if layout and job.tamper is not None else None
        self._tracer = Tracer(model, 1 if layout else job.config.sp_size) if job.trace else None
        self.callbacks: list[TrainerCallback] = [self._recorder]
        if layout:
            self.callbacks.append(HFParallelCallback(job.config, sample=sample))
        if self._tamper is not None:
            self.callbacks.append(self._tamper)
        if self._tracer is not None:
            self.callbacks.append(_SwitchOn(self._tracer, self._recorder))

    def run(self, trainer: Trainer, train: Callable[[], Any]) -> None:
        """Train, and write what was seen.

        Args:
            trainer: The Trainer that got the callbacks.
            train: Its `train`.
        """
        self._recorder.trainer = trainer
        if self._tamper is not None:
            self._tamper.trainer = trainer
        if trainer.args.fp16:
            _cast_on_cpu(trainer)
        if trainer.args.gradient_checkpointing or any(
            getattr(module, "gradient_checkpointing", False) is True for module in self._model.modules()
        ):
            self._ties = None  # a choice that is made again in the backward pass must not be turned otherwise
        try:
            with self._ties or nullcontext(), nullcontext() if self._is_layout else clipping_exactly():
                train()
        finally:
            if self._ties is not None:
                self._ties.write(self._folder)
            if self._tracer is not None:
                self._tracer.write(self._folder, {**self._recorder.place(), "parts": self._parts})
        if not self._is_layout and self._recorder.trained < self._recorder.steps:
            raise UnsupportedError(
                f"verify: the run in one process took {self._recorder.trained} of the {self._recorder.steps} optimizer steps that are "
                "compared: it goes on from a checkpoint, a callback ends it, or there are fewer rows than a step of all replicas takes. "
                "Remove resume_from_checkpoint and callbacks that end the training, give more rows, or give a smaller --steps."
            )
        self._recorder.finish()
        session = getattr(trainer.accelerator, "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()


@contextmanager
def clipping_exactly() -> Iterator[None]:
    """Inside, torch clips by a norm that is summed in fp64.

    On a CPU its own sums the squares of a tensor in fp32, one after the other: 1e6 elements cost 1e-5 of the norm, 1e7 3e-4, in
    all runs of one process alike. Then a sound layout of a model with an ordinary vocabulary would seem to clip otherwise.
    """

    def clip(
        parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, **_: Any
    ) -> Any:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        pieces = [piece for p in found if p.grad is not None for piece in p.grad.reshape(-1).split(PIECE)]
        norms = [torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64) for piece in pieces]
        norm = torch.linalg.vector_norm(torch.stack([torch.zeros((), dtype=torch.float64), *norms]), norm_type).float()
        torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
        return norm

    before = torch.nn.utils.clip_grad_norm_
    vars(torch.nn.utils)["clip_grad_norm_"] = clip
    try:
        yield
    finally:
        vars(torch.nn.utils)["clip_grad_norm_"] = before


@torch.no_grad()
def perturb(model: nn.Module, eps: float, seed: int) -> None:
    """Move each weight by up to half a unit in its last place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.mul_(1 + eps * (torch.rand(parameter.shape, generator=generator) - 0.5))


def _cast_on_cpu(trainer: Trainer) -> None:
    """Give an accelerator the casts and the loss scaler that it makes for fp16 on accelerators alone."""
    accelerator: Any = trainer.accelerator
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)


class _SwitchOn(TrainerCallback):
    """Traces the last step, which is not clipped: its gradients are those that came out of the reduction."""

    def __init__(self, tracer: Tracer, recorder: Recorder) -> None:
        self._tracer, self._recorder = tracer, recorder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The layout is planned and checked."""
        if state.global_step == self._recorder.steps - 1:
            self._recorder.write_parameters(BEFORE)
            args.max_grad_norm = 0.0
            self._tracer.is_on = True


class _Tamper(TrainerCallback):
    """Puts a bug into a rank when all is planned, checked and prepared.

    Args:
        name: `module:function`, called with the Trainer.
    """

    def __init__(self, name: str) -> None:
        module, _, function = name.partition(":")
        self._function = getattr(importlib.import_module(module), function)
        self.trainer: Trainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is cut, sharded and replicated."""
        self._function(self.trainer)
