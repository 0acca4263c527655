"""Numbers that user code makes of several parameters or counts, and noise it draws: as on one process, or refused in time."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import user_steps
from thinning import rest_runs, slow_if
from torch import nn
from transformers import Trainer, TrainerCallback


pytestmark = pytest.mark.long

PP2, TP2 = {"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}


class AtStepEnd(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            self.change(model, state.global_step)

    def change(self, model: Any, step: int) -> None:
        raise NotImplementedError


class Prunes(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        limit = torch.quantile(torch.cat([p.abs().flatten() for p in model.parameters()]), 0.1)
        for parameter in model.parameters():
            parameter.mul_(parameter.abs() > limit)


class PrunesByMeans(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        limit = 0.1 * torch.stack([p.abs().sum() / p.numel() for p in model.parameters()]).mean()
        for parameter in model.parameters():
            parameter.data.masked_fill_(parameter.abs() < limit, 0.0)


class NamedNoise(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
            parameter.data.add_(torch.randn(parameter.size(), generator=generator), alpha=0.01)


class SeededNoise(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
            parameter.copy_(nn.functional.dropout(parameter, 0.1))
            parameter.add_(torch.bernoulli(parameter.abs().clamp(max=1.0)), alpha=0.01)


class DrawsAnew(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        for index, parameter in enumerate(p for p in model.parameters() if p.ndim > 1):
            torch.manual_seed(100 * step)
            if index == 2 and step == 2:
                nn.init.xavier_uniform_(parameter)
            if index == 3 and step == 2:
                parameter.normal_(std=0.05)


class Averages(AtStepEnd):
    """Averages that are made by the shapes of parameters."""

    def change(self, model: Any, step: int) -> None:
        parameters = list(model.parameters())
        if step == 1:
            self.means = [torch.zeros(parameter.shape) for parameter in parameters]
        for mean, parameter in zip(self.means, parameters, strict=True):
            mean.mul_(0.5).add_(parameter.detach(), alpha=0.5)
            if step == 2:
                parameter.copy_(mean)


class Counts(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            gradient.mul_(1 / (1 + 50 * gradient.abs().sum() / gradient.numel()))
            if gradient.ndim > 1:
                gradient[: gradient.shape[0] // 2].mul_(0.5)
                gradient[:, len(gradient) % gradient.size(1) :] *= 0.9


class ClipsEachBatch(Trainer):
    """The sum so far is clipped after every batch of a step."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss


class ClipsOfFrozenHalf(TrainerCallback):
    """torch clips `model.parameters()`, of which the first stage has no gradient; what it returns is asked for on every rank."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.1


def freeze_half(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)


class Casts(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        model.to(torch.float64)


class SmallerHead(AtStepEnd):
    def change(self, model: Any, step: int) -> None:
        model.lm_head = nn.Linear(32, 50, bias=False)


class ByAutograd(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        return loss.detach()


class FillsByAutograd(Trainer):
    """Takes zeros for what `torch.autograd.grad` finds no way to, as meta-learning code does."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        parameters = list(model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        return loss.detach()


class CallsBase(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = model.model(input_ids=inputs["input_ids"])[0]
        return model.lm_head(hidden).float().logsumexp(-1).mean()


def adding(kind: type[TrainerCallback]) -> dict[str, Any]:
    return {"change": lambda trainer: trainer.add_callback(kind())}


CALLBACKS = (Prunes, PrunesByMeans, NamedNoise, SeededNoise, DrawsAnew, Averages, Counts, Casts, SmallerHead)
user_steps.KINDS |= {kind.__name__: (Trainer, adding(kind)) for kind in CALLBACKS}
user_steps.KINDS |= {kind.__name__: (kind, {}) for kind in (ClipsEachBatch, ByAutograd, FillsByAutograd, CallsBase)}
user_steps.KINDS["ClipsOfFrozenHalf"] = (Trainer, adding(ClipsOfFrozenHalf) | {"prepare": freeze_half})
TIED = {"model": "llama_tied"}
READ = "numbers of the parameters of several blocks"
NUMBERS, NOISE = (
    "is changed in a callback by numbers made of the parameters of",
    "that a callback draws one after another",
)
GIVEN_AWAY = "parallelized model's forward, torch.autograd.grad gave them"
# Kind, settings, more, and what an error says; none where the run must be that of one process.
JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "prunes_pp2": ("Prunes", PP2, {}, NUMBERS),
    "prunes_tied_pp2": ("Prunes", PP2, TIED, NUMBERS),
    "means_pp2": ("PrunesByMeans", PP2, {}, READ),
    "means_tp2": ("PrunesByMeans", TP2, {}, ""),
    "named_noise_pp2": ("NamedNoise", PP2, {}, ""),
    "named_noise_tp2": ("NamedNoise", TP2, {}, ""),
    "noise_pp2": ("SeededNoise", PP2, {}, NOISE),
    "noise_tied_pp2": ("SeededNoise", PP2, TIED, NOISE),
    "noise_tp2": ("SeededNoise", TP2, {}, ""),
    "drawn_tp2": ("DrawsAnew", TP2, {}, ""),
    "averages_pp2": ("Averages", PP2, {}, ""),
    "averages_tp2": ("Averages", TP2, {}, ""),
    "counts_pp2": ("Counts", PP2, {}, ""),
    "counts_tp2": ("Counts", TP2, {}, ""),
    "counts_zero1": ("Counts", {"zero": {"stage": 1}}, {}, ""),
    "clips_each_tp2": ("ClipsEachBatch", TP2, {}, ""),
    "clips_each_tied_tp2": ("ClipsEachBatch", TP2, TIED, ""),
    "clips_frozen_stage_pp2": ("ClipsOfFrozenHalf", PP2 | {"split": [2, 2]}, {}, ""),
    "casts_pp2": ("Casts", PP2, {}, "was cast from torch.float32 to torch.float64"),
    "casts_tp2": ("Casts", TP2, {}, "was cast from torch.float32 to torch.float64"),
    "casts_dp2": ("Casts", {}, {}, "was cast from torch.float32 to torch.float64"),
    "smaller_head_tp2": ("SmallerHead", TP2, {}, "was replaced or taken out after the model was prepared"),
    "autograd_pp2": ("ByAutograd", PP2, {}, "torch.autograd.grad of a loss with pp_size=2"),
    "autograd_filled_pp2": ("FillsByAutograd", PP2, {}, GIVEN_AWAY),
    "autograd_filled_zero3": ("FillsByAutograd", {"zero": {"stage": 3}}, {}, GIVEN_AWAY),
    "base_pp2": ("CallsBase", PP2, {}, "Call the whole model and no part of it"),
}
# Slow: what another job of the same user code shows on another axis, or of a tied model.
REST = (
    "prunes_tied_pp2",
    "noise_tied_pp2",
    "casts_pp2",
    "casts_tp2",
    "named_noise_tp2",
    "averages_pp2",
    "counts_pp2",
    "clips_each_tp2",
)


def marked(*, refused: bool) -> list[Any]:
    return [pytest.param(job, marks=slow_if(job, REST)) for job in JOBS if bool(JOBS[job][3]) == refused]


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


def on_two(job: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    name, parallel, more, _ = JOBS[job]
    return name, parallel, {"rows": user_steps.rows_on_two(parallel), **more}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    jobs = {job: rest for job, rest in JOBS.items() if job not in REST or rest_runs(request)}
    right = {job: (name, str(more)) for job, (name, _, more, error) in jobs.items() if not error}
    ones = {key: (key[0], None, {"rows": 8, **JOBS[job][2]}) for job, key in right.items()}
    twos = {job: on_two(job) for job in right}
    return user_steps.launch_both(ones, twos, tmp_path_factory.mktemp("numbers"), many)


@pytest.mark.parametrize("job", marked(refused=False))
def test_right(job: str, runs: user_steps.Runs) -> None:
    ones, twos = runs
    name, _, more, _ = JOBS[job]
    user_steps.same(twos[job][0], ones[name, str(more)][0])


@pytest.mark.parametrize("job", marked(refused=True))
def test_refused(job: str, tmp_path: Path) -> None:
    name, _, _, error = JOBS[job]
    for rank in user_steps.launch([on_two(job)], 2, tmp_path, many)[0]:
        assert error in str(rank["error"])
        assert rank["steps"] == (0 if name in ("ByAutograd", "FillsByAutograd", "CallsBase") else 1)
