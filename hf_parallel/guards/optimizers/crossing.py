"""Whether an optimizer's update of one parameter depends on others: on their gradients, or on how many come before it.

With pipeline stages every rank steps on its own parameters. An optimizer that clips by a norm over all of them, or adapts
one number from all (Prodigy, D-Adaptation), would use another norm on every rank, without a word; one that pairs parameters
with a list of tensors of its own (Lookahead) would pair others. What counts is what it does: a copy of it takes a few steps
on small parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, optim

from hf_parallel.guards.optimizers.trial import (
    CannotTry,
    moves,
    own_numbers,
    paired_tensors,
    small_sizes,
    steps,
    trying,
)


TOLERANCE = 1e-5
OTHERS = 7.0  # what the gradients of others are multiplied with
# Of gradients. With OTHERS a norm over all grows fivefold, so that a limit anywhere between is met by one of two runs and not the other.
SCALES = (1.0, 5.0**-4, 5.0**-3, 5.0**-2, 5.0**-1, 5.0, 5.0**2, 5.0**3)


def crosses_parameters(optimizer: optim.Optimizer) -> bool:
    """Whether half of the parameters, or numbers of groups, change when the gradients of the other half are different.

    Neither the optimizer nor its parameters are changed; random states are put back.

    Args:
        optimizer: Optimizer of any class, before its first step.

    Raises:
        CannotTry: The trial cannot decide it.
    """
    any_moved = False
    with trying(optimizer):
        sizes = small_sizes(optimizer)
        for scale in SCALES:
            (mine, one), (theirs, other) = (steps(optimizer, sizes, scale, factor) for factor in (1.0, OTHERS))
            if _differ(mine[::2], theirs[::2]) or _numbers(one) != _numbers(other):
                return True
            any_moved = any_moved or any(bool(moved.any()) for moved in mine)
    if not (any_moved or _is_empty(type(optimizer).step)):
        raise CannotTry("its steps moved none of the parameters")
    return False


def _is_empty(step: Callable[..., Any]) -> bool:
    """Whether a function reads nothing but its arguments: that of an optimizer which stands in where hooks step in the backward pass."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and not (code.co_names or code.co_freevars)


def goes_by_place(optimizer: optim.Optimizer) -> bool:
    """Whether its parameters move differently when the first of them is taken out, or were counted when it was built.

    As `crosses_parameters`. False for one that draws random numbers, which are others then, or whose copy does not step.
    """
    if _has_counted(optimizer.state.values()):
        return True
    try:
        with own_numbers(optimizer) as device:
            sizes = small_sizes(optimizer)
            whole = moves(optimizer, sizes)
            return _has_fresh_numbers(device) and _differ(moves(optimizer, sizes, without=1), whole[1:])
    except Exception:  # noqa: BLE001  as above
        return False


def draws_numbers(optimizer: optim.Optimizer) -> bool:
    """Whether a step draws from torch's own generator: a rank that steps on other parameters draws other numbers for each.

    As `crosses_parameters`. False for one whose copy does not step.
    """
    try:
        with own_numbers(optimizer) as device:
            moves(optimizer, small_sizes(optimizer))
            return not _has_fresh_numbers(device)
    except Exception:  # noqa: BLE001  as above
        return False


def _has_fresh_numbers(device: torch.device) -> bool:
    """Whether nothing was drawn since the last step of `moves` began."""
    now = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    torch.manual_seed(0)
    fresh = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return all(torch.equal(one, other) for one, other in zip(now, fresh, strict=True))


def keeps_by_place(optimizer: optim.Optimizer) -> bool:
    """Whether it has a list of tensors that go with its parameters, one by one, beside its states."""
    return bool(paired_tensors(optimizer))


def _differ(moved: list[Tensor], others: list[Tensor]) -> bool:
    return any(not torch.allclose(a, b, rtol=TOLERANCE, atol=1e-9) for a, b in zip(moved, others, strict=True))


def _numbers(stepper: optim.Optimizer) -> list[dict[str, float]]:
    """The numbers of an optimizer's groups; some are computed from gradients (Prodigy's factors grow after many steps)."""
    return [
        {
            name: float(value)
            for name, value in group.items()
            if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in stepper.param_groups
    ]


def _has_counted(states: Iterable[dict[str, Any]]) -> bool:
    """Whether each parameter was given a number of its own before the first step (to draw its projection from, say)."""
    made = list(states)
    if any(isinstance(value, Tensor) for own in made for value in own.values()):
        return False
    given: dict[str, list[int]] = {}
    for own in made:
        for key, value in own.items():
            given.setdefault(key, []).extend([value] if type(value) is int else [])
    return any(len(numbers) > 1 and len(set(numbers)) == len(numbers) for numbers in given.values())
