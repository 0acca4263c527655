"""What users do to a model in the middle of training, and with numbers that only one stage has: right, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import user_steps
from torch import nn
from transformers import Trainer, TrainerCallback


pytestmark = pytest.mark.long


PP2 = {"pp_size": 2, "num_microbatches": 2}
TP2 = {"tp_size": 2}


class AfterTwo(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.change(model)

    def change(self, model: Any) -> None:
        raise NotImplementedError


class NewHead(AfterTwo):
    def change(self, model: Any) -> None:
        model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)


class SwapsBlocks(AfterTwo):
    def change(self, model: Any) -> None:
        model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


class DropsBlock(AfterTwo):
    def change(self, model: Any) -> None:
        model.model.layers = model.model.layers[:3]


class NewActivation(AfterTwo):
    """A module without parameters may be another."""

    def change(self, model: Any) -> None:
        for block in model.model.layers:
            block.mlp.act_fn = nn.Tanh()


class ClipsByHand(TrainerCallback):
    """As scripts did before `clip_grad_norm_`."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        total = sum(float(gradient.norm()) ** 2 for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.05 / (total + 1e-6)))


class ClipsBySquares(TrainerCallback):
    """The same without a norm, and with new gradients."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        total = torch.stack([parameter.grad.pow(2).sum() for parameter in parameters]).sum().sqrt()
        for parameter in parameters:
            parameter.grad = parameter.grad * (0.05 / (total + 1e-6))


class ReadsAndHalves(TrainerCallback):
    """Numbers of gradients for a log, and one factor for all of them."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen = [float(parameter.grad.abs().max()) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)


class ScalesEach(TrainerCallback):
    """Another factor for each gradient, by its own norm."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.1 / (1.0 + float(parameter.grad.norm())))


class OnlyFirst(TrainerCallback):
    """Another weight decay from the third step on, on one rank."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            for group in optimizer.param_groups:
                group["weight_decay"] = 5.0


class Smooths(TrainerCallback):
    """Gradients of earlier steps are added, through `.data`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.means: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            before = self.means.get(name, torch.zeros_like(parameter.grad))
            self.means[name] = before * 0.9 + parameter.grad.data.detach() * 0.1
            parameter.grad.data = parameter.grad.data + self.means[name] * 2


def counting(model: Any) -> None:
    """A block that grows with every call."""
    mlp = model.model.layers[1].mlp
    mlp.calls = 0

    def grow(module: Any, inputs: Any, output: Any) -> Any:
        module.calls += module.training
        return output * (1 + 0.1 * module.calls)

    mlp.register_forward_hook(grow)


class ClipsEachBatch(Trainer):
    """The sum so far is clipped after every batch of a step."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss


class DifferentiatesByHand(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.detach()


def adding(kind: type[TrainerCallback]) -> dict[str, Any]:
    return {"change": lambda trainer: trainer.add_callback(kind())}


KINDS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    kind.__name__: (Trainer, adding(kind))
    for kind in (
        *(NewHead, SwapsBlocks, DropsBlock, NewActivation),
        *(ClipsByHand, ClipsBySquares, ReadsAndHalves, ScalesEach, Smooths, OnlyFirst),
    )
}
KINDS["clips_each"] = (ClipsEachBatch, {})
KINDS["by_autograd"] = (DifferentiatesByHand, {})
KINDS["counting"] = (Trainer, {"prepare": counting})
user_steps.KINDS |= KINDS

REPLACED, SCALED = "was replaced or taken out after the model was prepared", "is not that of the model"
JOBS: user_steps.Jobs = {
    "clips_each_pp2": ("clips_each", PP2, "", 0),
    "clips_each_tied_pp2": ("clips_each", PP2, "is read or limited between two batches", 0),
    "new_head_pp2": ("NewHead", PP2, REPLACED, 2),
    "new_head_tp2": ("NewHead", TP2, REPLACED, 2),
    "new_head_dp2": ("NewHead", {}, REPLACED, 2),
    "new_head_zero3": ("NewHead", {"zero": {"stage": 3}}, REPLACED, 2),
    "swapped_pp2": ("SwapsBlocks", PP2, REPLACED, 2),
    "dropped_pp2": ("DropsBlock", PP2, REPLACED, 2),
    "activation_pp2": ("NewActivation", PP2, "", 0),
    "activation_tp2": ("NewActivation", TP2, "", 0),
    "counting_pp2": ("counting", PP2, "the forward pass writes to", 0),
    "counting_alone_pp2": ("counting", {"pp_size": 2, "num_microbatches": 1}, "", 0),
    "by_hand_pp2": ("ClipsByHand", PP2, SCALED, 0),
    "by_hand_tp2": ("ClipsByHand", TP2, "", 0),
    "by_hand_zero1": ("ClipsByHand", {"zero": {"stage": 1}}, "", 0),
    "autograd_dp2": ("by_autograd", {}, "gradients that were never reduced", 0),
    "autograd_tp2": ("by_autograd", TP2, "gradients that were never reduced", 0),
    "autograd_zero1": ("by_autograd", {"zero": {"stage": 1}}, "gradients that were never reduced", 0),
    "autograd_zero2": ("by_autograd", {"zero": {"stage": 2}}, "gradients that were never reduced", 0),
    "squares_pp2": ("ClipsBySquares", PP2, SCALED, 0),
    "halved_pp2": ("ReadsAndHalves", PP2, "", 0),
    "each_pp2": ("ScalesEach", PP2, "", 0),
    "only_first_pp2": ("OnlyFirst", PP2, "weight_decay of parameter group 0 of the optimizer is 5.0 on rank 0", 2),
    "only_first_tp2": ("OnlyFirst", TP2, "weight_decay of parameter group 0 of the optimizer is 5.0 on rank 0", 2),
    "smooths_pp2": ("Smooths", PP2, "", 0),
    "smooths_tp2": ("Smooths", TP2, "", 0),
    "smooths_zero1": ("Smooths", {"zero": {"stage": 1}}, "", 0),
}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(
        JOBS, tmp_path_factory.mktemp("attacks"), many, {"clips_each_tied_pp2": {"model": "llama_tied"}}
    )


@pytest.mark.parametrize("job", JOBS)
def test_right_or_refused(job: str, runs: user_steps.Runs) -> None:
    user_steps.check_job(JOBS, job, runs)
