"""One step size a head (Adam-mini) and slow weights (Lookahead) are right on stages, signs (Lion) also on parts of tensors.

So are optimizers that move weights between steps (Schedule-Free), unless other ranks would have to get what they move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import user_steps
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import nn
from transformers import Trainer


pytestmark = pytest.mark.long


class OfHeads(torch.optim.Optimizer):
    """One step size for each head of queries and keys, one for each row of other matrices, and one for each other parameter.

    It knows them by name, in groups of one parameter each, and keeps the generator that it read them from, as Adam-mini does.
    """

    def __init__(self, named: Iterator[tuple[str, nn.Parameter]], width: int, heads: int) -> None:
        self.named, self.of_a_head = named, width * width // heads
        super().__init__([{"name": name, "params": [parameter]} for name, parameter in named], {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.update(group["name"], parameter), alpha=-group["lr"])
        return None

    def update(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        by_head = "q_proj" in name or "k_proj" in name
        gradient = parameter.grad.view(-1, self.of_a_head) if by_head else parameter.grad  # type: ignore[union-attr]
        state = self.state[parameter]
        if not state:
            state |= {"m": torch.zeros_like(gradient), "v": torch.zeros_like(self.mean(gradient)), "step": 0}
        state["step"] += 1
        state["m"].lerp_(gradient, 0.1)
        state["v"].lerp_(self.mean(gradient.square()), 0.05)
        size = (state["v"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-4
        return (state["m"] / (1 - 0.9 ** state["step"]) / size).view_as(parameter)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mean(1, keepdim=True) if tensor.ndim > 1 else tensor.mean()


class Lookahead(torch.optim.Optimizer):
    """Slow weights round another optimizer, by parameter, as those of packages are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.state = optimizer.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        self.steps += 1
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if self.steps % 2 == 0:
                self.slow[parameter].lerp_(parameter, 0.5)
                parameter.copy_(self.slow[parameter])


class InLists(Lookahead):
    """Slow weights in a list for each group."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.lists = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for group, slow in zip(self.param_groups, self.lists, strict=True):
            for parameter, tensor in zip(group["params"], slow, strict=False):
                parameter.copy_(tensor.lerp_(parameter, 0.5))


class Signs(torch.optim.Optimizer):
    """Steps by the signs of averaged gradients, as the Lion of lion_pytorch, whose place it takes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    parameter.mul_(1 - group["lr"] * 0.1)
                    parameter.add_((average * 0.9).add(parameter.grad, alpha=0.1).sgn_(), alpha=-group["lr"])
                    average.mul_(0.99).add_(parameter.grad, alpha=0.01)
        return None


Signs.__module__, Signs.__qualname__ = "lion_pytorch.lion_pytorch", "Lion"


def of_heads(model: Any) -> torch.optim.Optimizer:
    return OfHeads(model.named_parameters(), model.config.hidden_size, model.config.num_attention_heads)


def lookahead(model: Any, kind: type[Lookahead] = Lookahead) -> torch.optim.Optimizer:
    return kind(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))


def given(trainer: Any, make: Any) -> None:
    trainer.optimizer = make(trainer.model)


class Makes(Trainer):
    """It makes its optimizer of the model as it is when training begins."""

    make: Any

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = self.make(self.model)
        return self.optimizer


def made(trainer: Any, make: Any) -> None:
    trainer.make = make


MAKES = {
    "heads": of_heads,
    "slow": lookahead,
    "lists": lambda model: lookahead(model, InLists),
    "signs": lambda model: Signs(model.parameters()),
    "free": lambda model: AdamWScheduleFree(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1),
    "free_sgd": lambda model: SGDScheduleFree(model.parameters(), lr=1e-1, foreach=False),
}
for name, make in MAKES.items():
    user_steps.KINDS[f"{name}_given"] = (Trainer, {"change": lambda trainer, make=make: given(trainer, make)})
    user_steps.KINDS[f"{name}_made"] = (Makes, {"change": lambda trainer, make=make: made(trainer, make)})
PP2 = {"pp_size": 2, "num_microbatches": 2}
BY_PLACE = "make it when the model was prepared (in create_optimizer of a Trainer)"
MOVED = "its train() and eval() move weights between steps, and other ranks would not get those of this one"
WHOLE = "its update may use norms or factors of whole tensors"
JOBS: user_steps.Jobs = {
    "heads_given-pp2": ("heads_given", PP2, "", 0),
    "heads_made-pp2": ("heads_made", PP2, "", 0),
    "heads_made-dp2": ("heads_made", {}, "", 0),
    "heads_made-tp2": ("heads_made", {"tp_size": 2}, WHOLE, 0),
    "slow_given-pp2": ("slow_given", PP2, "", 0),
    "lists_made-pp2": ("lists_made", PP2, "", 0),
    "signs_made-tp2": ("signs_made", {"tp_size": 2}, "", 0),
    "signs_given-zero1": ("signs_given", {"zero": {"stage": 1}}, "", 0),
    "signs_given-zero3": ("signs_given", {"zero": {"stage": 3}}, "", 0),
    "free_made-tp2": ("free_made", {"tp_size": 2}, "", 0),
    "free_given-pp2": ("free_given", PP2, "", 0),
    "free_given-dp2": ("free_given", {}, "", 0),
    "free_sgd_given-tp2": ("free_sgd_given", {"tp_size": 2}, "", 0),
    "free_made-zero3": ("free_made", {"zero": {"stage": 3}}, "", 0),
    "free_made-zero1": ("free_made", {"zero": {"stage": 1}}, MOVED, 0),
    "lists_given-pp2": ("lists_given", PP2, BY_PLACE, 0),
}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(JOBS, tmp_path_factory.mktemp("blocks"), many)


@pytest.mark.parametrize("job", JOBS)
def test_what_belongs_to_each_parameter_or_element_is_right(job: str, runs: user_steps.Runs) -> None:
    user_steps.check_job(JOBS, job, runs)
