"""Whether an optimizer's update of one parameter depends on the gradients of others.

With pipeline stages every rank steps on its own parameters. An optimizer that clips by a norm over all of them, or adapts
one number from all (Prodigy, D-Adaptation), would use another norm on every rank, without a word. What counts is what it
does: a copy of it steps twice on tiny parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn, optim

from hf_parallel.compat.private_optimizers import is_hook_table


MOST = 64  # parameters of a group that take part
TOLERANCE = 1e-5
SIZE = 4  # of a dimension


def crosses_parameters(optimizer: optim.Optimizer) -> bool | None:
    """Whether half of its parameters move differently when the gradients of the other half are different.

    Neither the optimizer nor its parameters are changed; random states are put back.

    Args:
        optimizer: Of any class, before its first step.

    Returns:
        None if that cannot be found out: its copy does not step on tiny parameters.
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            moved = [_moves(optimizer, others) for others in (1.0, 7.0)]
    except Exception:  # noqa: BLE001  code of the user's, on a copy, may raise anything
        return None
    return any(not torch.allclose(a, b, rtol=TOLERANCE, atol=1e-9) for a, b in zip(*moved, strict=True))


def _moves(optimizer: optim.Optimizer, others: float) -> list[Tensor]:
    """How every second parameter moved in two steps, the gradients of the rest being multiplied with `others`."""
    stepper, parameters = _tiny(optimizer)
    before = [parameter.detach().double().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for index, parameter in enumerate(parameters):
            drawn = torch.randn(parameter.shape, generator=generator) * (others if index % 2 else 1.0)
            parameter.grad = drawn.to(parameter.device, parameter.dtype)
        torch.manual_seed(0)
        stepper.step()
    return [p.detach().double() - b for p, b in zip(parameters[::2], before[::2], strict=True)]


def _tiny(optimizer: optim.Optimizer) -> tuple[optim.Optimizer, list[nn.Parameter]]:
    """A copy of `optimizer` whose parameters are tiny, and two of them at least."""
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    groups: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        made = []
        for parameter in group["params"]:
            drawn = torch.randn([min(SIZE, size) for size in parameter.shape], generator=generator)
            small = nn.Parameter(drawn.to(parameter.device, parameter.dtype), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = small
            made.append(small)
        groups.append([small for small in made if small.requires_grad][:MOST])
    stepper = copy.copy(optimizer)
    vars(stepper).clear()
    for name, value in vars(optimizer).items():
        if is_hook_table(name):  # hooks mean the real one
            vars(stepper)[name] = type(value)()
        elif name == "state":
            vars(stepper)[name] = type(value)(value.default_factory)
        else:
            vars(stepper)[name] = copy.deepcopy(value, memo)
    for group, members in zip(stepper.param_groups, groups, strict=True):
        group["params"] = members
    parameters = [small for members in groups for small in members]
    if len(parameters) == 1:
        parameters.append(nn.Parameter(parameters[0].detach().clone()))
        next(group for group in stepper.param_groups if group["params"])["params"].append(parameters[1])
    return stepper, parameters
