"""More parts of the scripts that `make differential` draws: callbacks, hooks and optimizers; see differential_parts."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


# -- callbacks -------------------------------------------------------------------------------------------------------


class Delayed(TrainerCallback):
    """What a pipeline that does not drain computes: gradients at the weights of some updates ago, added to the newest.

    Args:
        delay: Updates between the weights of a gradient and the newest.
        split: Blocks of each stage where these have delays of their own, the last none (`vertical_sync: false`).
    """

    def __init__(self, delay: int, split: tuple[int, ...] = ()) -> None:
        self.delay, self.versions = delay, []
        self.ends = [sum(split[: place + 1]) for place in range(len(split))]

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.versions = [*self.versions[-self.delay :], [p.detach().clone() for p in model.parameters()]]
        self.load(model, self.delay_of)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.load(model, lambda name: 0)

    def delay_of(self, name: str) -> int:
        """What lies before the blocks is on the first stage, what follows them on the last."""
        if not self.ends:
            return self.delay
        block = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
        if block is None:
            return self.delay if re.search("embed_(tokens|in|positions)|embeddings|wte|wpe", name) else 0
        return sum(int(block[1]) < end for end in self.ends[:-1])

    @torch.no_grad()
    def load(self, model: Any, delay_of: Callable[[str], int]) -> None:
        for place, (name, parameter) in enumerate(model.named_parameters()):
            parameter.copy_(self.versions[max(0, len(self.versions) - 1 - delay_of(name))][place])


class Clamp(TrainerCallback):
    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


class Average(TrainerCallback):
    """An exponential average that replaces the weights after the second step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for mean, parameter in zip(self.average, model.parameters(), strict=True):
            mean.lerp_(parameter, 0.5)
            if state.global_step == 2:
                parameter.copy_(mean)


class Reload(TrainerCallback):
    """Back to the first weights after the second step, as after a spike of the loss."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            model.load_state_dict(self.kept)


class Rebind(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9


class ClipNorm(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class ClipValue(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)


class ScaleGradients(TrainerCallback):
    """Smaller gradients of vectors, by hand."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.ndim == 1:
                parameter.grad.mul_(0.1)


class DropGradients(TrainerCallback):
    """No update of the vectors."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.grad = None


class DecayByHand(TrainerCallback):
    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.mul_(0.95)


class Unfreeze(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.requires_grad_(True)


class FreezeLater(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.get_input_embeddings().requires_grad_(False)


class Rate(TrainerCallback):
    """Another learning rate and weight decay from the second step on."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 3.0
            group["weight_decay"] = 0.3


class ResetMoments(TrainerCallback):
    """A fresh optimizer state after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            for held in optimizer.state.values():
                for value in held.values():
                    if torch.is_tensor(value):
                        value.zero_()


class StopEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 2


class ZeroAtBegin(TrainerCallback):
    """Smaller head at the start of training, as for a new task."""

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.mul_(0.5)


# -- what is put on a model before the Trainer sees it ---------------------------------------------------------------


def nudged(model: Any) -> None:
    """Weights moved at rounding level: how far is a run from itself?"""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)


def mask_rows(model: Any) -> None:
    """Train only the last rows of the embedding."""
    weight = model.get_input_embeddings().weight
    mask = (torch.arange(len(weight)) >= 60).unsqueeze(-1).to(weight.dtype)
    weight.register_hook(lambda gradient: gradient * mask)


def halve_gradients(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)


def louder_block(model: Any) -> None:
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)

    def louder(module: Any, inputs: Any, output: Any) -> Any:
        return (output[0] * 1.1, *output[1:]) if isinstance(output, tuple) else output * 1.1

    blocks[1].register_forward_hook(louder)


def rolled_ids(model: Any) -> None:
    """A hook on the embedding that sees the ids."""
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * 1.2)


def scaled_logits(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * 0.7)


def wrapped_forward(model: Any) -> None:
    """A forward of the user's that smooths the loss."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss * 0.8
        return outputs

    model.forward = forward


def normalised_head(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.get_output_embeddings())


def add_temperature(model: Any) -> None:
    model.temperature = torch.nn.Parameter(torch.tensor(0.8))


def uneven_weights(model: Any) -> None:
    """A head that is drawn anew after the seed took the rank in."""
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.2)


# -- optimizers ------------------------------------------------------------------------------------------------------


def user_adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5, weight_decay=0.1)


def user_sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9, nesterov=True)


def user_groups(model: Any) -> Any:
    slow, fast = [], []
    for name, parameter in model.named_parameters():
        (slow if "embed" in name or parameter.ndim == 1 else fast).append(parameter)
    groups = [{"params": slow, "lr": 3e-4, "weight_decay": 0.0}, {"params": fast, "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], eps=1e-5, weight_decay=0.1)


def user_lion(model: Any) -> Any:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        mean = state.setdefault("mean", torch.zeros_like(parameter))
                        parameter.sub_(group["lr"] * torch.tanh(300 * (0.9 * mean + 0.1 * parameter.grad)))
                        mean.lerp_(parameter.grad, 0.01)

    return Lion(model.parameters(), 1e-3)


def user_normalised(model: Any) -> Any:
    """Not elementwise, and named as one that is."""

    class AdamW(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad / (parameter.grad.norm() + 1e-3))

    return AdamW(model.parameters(), 1e-2)


class RatesByName(Trainer):
    """Layer-wise rates by an attribute of each parameter."""

    def create_optimizer(self, model: Any = None) -> Any:
        groups = [
            {"params": [p], "lr": 1e-2 if "norm" in name or "ln_" in name else 1e-3}
            for name, p in self.model.named_parameters()
            if p.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(groups, eps=1e-5)
        return self.optimizer


class RatesByAttribute(Trainer):
    """Rates by an attribute that the parameters carry."""

    def create_optimizer(self, model: Any = None) -> Any:
        groups = [
            {"params": [p], "lr": 1e-3 * getattr(p, "rate", 1.0)} for p in self.model.parameters() if p.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(groups, eps=1e-5)
        return self.optimizer


def tag_parameters(model: Any) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.rate = 1.0 + index % 3
