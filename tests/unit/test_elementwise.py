"""Which optimizers may update parts of tensors: by what they compute, not by what they are called."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hf_parallel.guards.optimizers.elementwise import ELEMENTWISE, treats_elements_alone


class Renamed(torch.optim.AdamW):
    """Nothing of its own but defaults."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, lr=lr)


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class WrappedStep(torch.optim.AdamW):
    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnGroups(torch.optim.SGD):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


class AdamW(torch.optim.Optimizer):
    """The name of a class that is known, and another rule."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Signs(torch.optim.Optimizer):
    """Steps by signs of averaged gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad.sign())


# Packages that are not installed for tests: by module and name.
LION = type("Lion", (Signs,), {"__module__": "lion_pytorch.lion_pytorch"})
OTHER_LION = type("Lion", (Signs,), {"__module__": "mine"})


def made(kind: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer: torch.optim.Optimizer = kind([parameter])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [*ELEMENTWISE, Renamed, LION])
def test_classes_whose_source_was_read_are_known(kind: Any) -> None:
    assert treats_elements_alone(made(kind))


@pytest.mark.parametrize("kind", [OwnStep, WrappedStep, OwnGroups, AdamW, OTHER_LION, torch.optim.Adafactor])
def test_a_rule_of_its_own_is_not_known_whatever_its_name(kind: Any) -> None:
    assert not treats_elements_alone(made(kind))
