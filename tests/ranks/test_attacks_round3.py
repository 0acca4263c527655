"""Random numbers for weights and gradients, parameters frozen in mid-step, optimizers that count: as on one process, or refused."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import user_steps
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback
from user_steps import on_logits


pytestmark = pytest.mark.long


PP2 = {"pp_size": 2, "num_microbatches": 2}
TP2 = {"tp_size": 2}
ZERO3 = {"zero": {"stage": 3}}
TIED = {"model": "llama_tied"}


class LossAndEntropy(Trainer):
    """The model's own loss, whose backward pass a pipeline runs at once, and a term on its logits."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        entropy = torch.distributions.Categorical(logits=outputs.logits.float()).entropy().mean()
        return outputs.loss - 0.1 * entropy


class OnLogits(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        return on_logits(model(**inputs).logits, labels)


class Freezes(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.get_input_embeddings().requires_grad_(False)


class FreezesBetween(TrainerCallback):
    """After the first batch of a step, which has given it a gradient."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.get_input_embeddings().requires_grad_(False)


class PutsBack(TrainerCallback):
    """Half of a step's gradient is there again when the next step begins."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept = [(p, p.grad.detach().clone() * 0.5) for p in model.parameters()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter, gradient in self.kept:
            parameter.grad = gradient


def on_sums(trainer: Trainer) -> None:
    """Hooks that see what one parameter has accumulated so far."""

    def limit(parameter: Any) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    for parameter in trainer.model.parameters():  # type: ignore[union-attr]
        parameter.register_post_accumulate_grad_hook(limit)


class OnGradients(TrainerCallback):
    """Each parameter has a seed of its own."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            torch.manual_seed(zlib.crc32(name.encode()) + state.global_step)
            self.change(parameter)

    def change(self, parameter: Any) -> None:
        raise NotImplementedError


class AddsNoise(OnGradients):
    def change(self, parameter: Any) -> None:
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)


class DropsOut(OnGradients):
    def change(self, parameter: Any) -> None:
        parameter.grad = F.dropout(parameter.grad, 0.3)


class Replaces(OnGradients):
    def change(self, parameter: Any) -> None:
        parameter.grad.normal_(std=1e-3)


class MasksAtRandom(OnGradients):
    def change(self, parameter: Any) -> None:
        parameter.grad.mul_(torch.bernoulli(torch.full_like(parameter.grad, 0.5)))


class NoiseInTurn(TrainerCallback):
    """Gradient noise as papers write it: drawn for one parameter after another."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad) * 1e-3)


class OnWeights(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                torch.manual_seed(zlib.crc32(name.encode()) + state.global_step)
                self.change(name, parameter)

    def change(self, name: str, parameter: Tensor) -> None:
        parameter.add_(torch.randn_like(parameter), alpha=1e-2)


class Initialises(OnWeights):
    """Anew, with torch's functions."""

    def change(self, name: str, parameter: Tensor) -> None:
        if "down_proj" in name:
            torch.nn.init.xavier_uniform_(parameter)
        elif "norm" not in name:
            parameter.data.mul_((torch.rand_like(parameter) > 0.1).float())


class ThroughData(OnWeights):
    def change(self, name: str, parameter: Tensor) -> None:
        parameter.data.add_(torch.empty_like(parameter.data).uniform_(-1e-2, 1e-2))


class Lookahead(torch.optim.AdamW):
    """Keeps slow weights in a list beside its parameters, as most versions of it do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, eps=1e-5)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, slow in zip(parameters, self.slow, strict=False):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


class InGroups(torch.optim.AdamW):
    """The same list in each group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, eps=1e-5)
        for group in self.param_groups:
            group["start"] = [p.detach().clone() for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter, start in zip(group["params"], group["start"], strict=False):
                parameter.lerp_(start, 0.1)


class ByNumber(torch.optim.AdamW):
    """The first parameters learn fastest."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(1 + number)
        return super().step(closure)


class OneByOne(torch.optim.AdamW):
    """Looks at each parameter by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.1 / (1.0 + parameter.grad.norm()))
        return super().step(closure)


def stepping(kind: Any) -> dict[str, Any]:
    def change(trainer: Trainer) -> None:
        blocks: Any = trainer.model.model.layers  # type: ignore[union-attr]
        trainer.model.requires_grad_(False)  # type: ignore[union-attr]
        blocks.requires_grad_(True)  # whose parameters have the shapes of those of any other block
        trainer.optimizer = kind(list(blocks.parameters()))

    return {"change": change}


def adding(kind: type[TrainerCallback]) -> dict[str, Any]:
    return {"change": lambda trainer: trainer.add_callback(kind())}


ON_GRADIENTS = (AddsNoise, DropsOut, Replaces, MasksAtRandom, NoiseInTurn)
ON_WEIGHTS = (OnWeights, Initialises, ThroughData)
KINDS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    kind.__name__: (Trainer, adding(kind)) for kind in (*ON_GRADIENTS, *ON_WEIGHTS, FreezesBetween)
}
KINDS |= {
    f"{kind.__name__}-{loss.__name__}": (loss, adding(kind))
    for kind in (Freezes, FreezesBetween)
    for loss in (LossAndEntropy, OnLogits)
}
OPTIMIZERS = (
    Lookahead,
    InGroups,
    functools.partial(ByNumber, lr=1e-2, eps=1e-5),
    functools.partial(OneByOne, lr=1e-2, eps=1e-5),
)
NAMES = ("Lookahead", "InGroups", "ByNumber", "OneByOne")
KINDS |= {name: (Trainer, stepping(kind)) for name, kind in zip(NAMES, OPTIMIZERS, strict=True)}
KINDS |= {"PutsBack": (Trainer, adding(PutsBack)), "on_sums": (Trainer, {"change": on_sums})}
user_steps.KINDS |= KINDS

ONE_AFTER_ANOTHER = "random numbers that a callback draws one after another"
BY_PLACE = "depends on the place of that parameter among others"
# Kind, settings, model, and what an error says; none where the run must be that of one process.
Job = tuple[str, dict[str, Any], dict[str, str], str]
JOBS: list[Job] = [
    ("AddsNoise", TP2, {}, ""),
    ("AddsNoise", ZERO3, {}, ""),
    ("AddsNoise", PP2, {}, ""),
    ("DropsOut", TP2, {}, ""),
    ("OnWeights", TP2, {}, ""),
    ("Initialises", ZERO3, {}, ""),
    ("NoiseInTurn", PP2, {}, ONE_AFTER_ANOTHER),
    ("Freezes-LossAndEntropy", PP2, {}, ""),
    ("FreezesBetween", PP2, TIED, ""),
    ("FreezesBetween", {}, {}, ""),
    ("Lookahead", PP2, {}, BY_PLACE),
    ("ByNumber", PP2, {}, BY_PLACE),
    ("OneByOne", PP2, {}, ""),
    ("PutsBack", PP2, TIED, ""),
    ("on_sums", ZERO3, {}, "would see the gradient of this backward pass only"),
]
MORE: list[Job] = [
    *((kind.__name__, layout, {}, "") for kind in (*ON_GRADIENTS, *ON_WEIGHTS) for layout in (TP2, ZERO3)),
    ("AddsNoise", {"zero": {"stage": 1}}, {}, ""),
    ("Freezes-LossAndEntropy", PP2, TIED, ""),
    *((f"FreezesBetween{loss}", PP2, TIED, "") for loss in ("-LossAndEntropy", "-OnLogits")),
    ("FreezesBetween-OnLogits", PP2, {}, ""),
    ("InGroups", PP2, {}, BY_PLACE),
    *((name, {}, {}, "") for name in NAMES),
    *(("FreezesBetween", layout, {}, "") for layout in ({"zero": {"stage": 1}}, TP2)),
]
MORE = [job for job in MORE if job not in JOBS]


def ids(jobs: list[Job]) -> list[str]:
    return [f"{kind}-{'_'.join(layout) or 'dp2'}{'-tied' if model else ''}" for kind, layout, model, _ in jobs]


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


def runs_of(wanted: list[Job], folder: Path) -> user_steps.Runs:
    kinds = sorted({(kind, bool(model)) for kind, _, model, error in wanted if not error})
    ones = {(kind, tied): (kind, None, {"rows": 8, **(TIED if tied else {})}) for kind, tied in kinds}
    twos = {
        job: (kind, layout, {"rows": user_steps.rows_on_two(layout), **model})
        for job, (kind, layout, model, _) in enumerate(wanted)
    }
    return user_steps.launch_both(ones, twos, folder, many)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return runs_of(JOBS, tmp_path_factory.mktemp("attacks"))


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return runs_of(MORE, tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize("job", range(len(JOBS)), ids=ids(JOBS))
def test_right_or_refused(job: int, runs: user_steps.Runs) -> None:
    check(JOBS, job, runs)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", range(len(MORE)), ids=ids(MORE))
def test_more_is_right_or_refused(job: int, more_runs: user_steps.Runs) -> None:
    check(MORE, job, more_runs)


def check(jobs: list[Job], job: int, runs: user_steps.Runs) -> None:
    ones, twos = runs
    kind, _, model, error = jobs[job]
    if not error:
        user_steps.same(twos[job][0], ones[kind, bool(model)][0])
        return
    assert any(error in str(rank["error"]) for rank in twos[job])
    assert all(rank["error"] and rank["steps"] == 0 for rank in twos[job])


@pytest.mark.parametrize(
    "kind", ["OnWeights", *(pytest.param(k.__name__, marks=pytest.mark.slow) for k in ON_WEIGHTS[1:])]
)
def test_draws_for_shards_of_shards_are_refused(kind: str, tmp_path: Path) -> None:
    settings = {**TP2, **ZERO3}
    for rank in user_steps.launch([(kind, settings, {"rows": 4})], 4, tmp_path, many)[0]:
        assert "random numbers for a parameter or gradient" in str(rank["error"])
        assert rank["steps"] == 1
