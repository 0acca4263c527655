"""Refuses optimizers with state that a checkpoint would not hold: a resumed run would train otherwise, without a word.

A checkpoint has the state of each parameter by name, so that any layout can read it: tensors, numbers, and the numbers of
parameter groups. What else an optimizer keeps is refused: before the first update where a copy shows it, else when it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.data_parallel.fsdp_parts import is_part
from hf_parallel.guards.optimizers.elementwise import known_names, treats_elements_alone
from hf_parallel.guards.optimizers.trial import CannotTry, stepped_copy


HELD = frozenset({"state", "param_groups"})


def what_is_lost(optimizer: torch.optim.Optimizer, *, later: bool = False) -> str | None:
    """Why a checkpoint would not hold all that this optimizer keeps; None if it would.

    Args:
        optimizer: The optimizer, with the state it has when it steps.
        later: Whether what it will keep after a step counts too, as far as a copy on tiny parameters shows it.
    """
    found = _lost(optimizer)
    if found is None and later and not treats_elements_alone(optimizer):
        with suppress(CannotTry):  # then its first checkpoint tells
            found = _lost(stepped_copy(optimizer))
    if found is None:
        return None
    return (
        f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}: a checkpoint would not hold {found}, and a run that "
        f"resumes from it would train otherwise. Use one of {known_names()}, or save weights only (save_only_model=True or "
        "save_strategy='no'; accelerator.save_model in a loop)."
    )


def _lost(optimizer: torch.optim.Optimizer) -> str | None:
    more = sorted(map(repr, optimizer.state_dict().keys() - HELD))
    if more:
        return f"what its state_dict() has beside the state of parameters ({', '.join(more)})"
    states: Mapping[Any, Any] = optimizer.state
    for key, state in states.items():
        if not isinstance(key, Tensor):
            return f"its state {key!r}, which belongs to no parameter"
        for name, value in state.items():
            if not _is_held(value):
                return f"its state {name!r} of type {type(value).__name__}"
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and not _is_number(value):
                return f"{name!r} of a parameter group, which is not numbers and text alone"
    return None


def _is_held(value: object) -> bool:
    """Whether a value of a parameter's state is a plain tensor, this rank's part of one, or a number."""
    if isinstance(value, Tensor) and value.numel() > 1:
        return type(value) in (Tensor, nn.Parameter) or is_part(value)
    return _is_number(value)


def _is_number(value: object) -> bool:
    """Whether JSON gives back what a step reads: a number, text, or lists and tables of these; a tuple becomes a list."""
    if isinstance(value, (list, tuple)):
        return not any(isinstance(one, Tensor) for one in value) and all(map(_is_number, value))
    if isinstance(value, Mapping):
        return all(type(key) is str for key in value) and _is_number(list(value.values()))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))
