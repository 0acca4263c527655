"""Finding the stack of repeated blocks that a pipeline cuts.

Candidates come from the module tree; which of them is the stack is decided by what runs: a pipeline stage needs blocks
that each run once per forward, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_parallel.compat.private_transformers import indivisible_modules
from hf_parallel.errors import PlanError


PLACES = ("idx", "index", "layer_id")  # parts of the names of attributes that say which block of the stack this is
SHOWN = 12  # how many calls of an order an error message lists


def candidate_stacks(model: nn.Module, *, least: int = 2) -> list[str]:
    """Names of the module lists that may be the stack, likeliest first.

    Ranked by: all children are marked as indivisible or checkpointable blocks, then parameter count, then depth.

    Args:
        model: The model.
        least: Children that a list must have; between two a model can be cut.

    Raises:
        PlanError: The model has none.
    """
    indivisible = indivisible_modules(model)
    ranked: list[tuple[bool, int, int, str]] = []
    for name, module in _lists(model, least):
        marked = all(type(m).__name__ in indivisible or isinstance(m, GradientCheckpointingLayer) for m in module)
        ranked.append((marked, sum(p.numel() for p in module.parameters()), -name.count("."), name))
    if not ranked:
        raise PlanError(
            f"cannot pipeline {type(model).__name__}: it has no nn.ModuleList (or nn.Sequential) of at least 2 repeated "
            "blocks to cut between. Use tensor parallel or ZeRO instead."
        )
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [name for *_, name in ranked]


def _lists(model: nn.Module, least: int) -> list[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Module lists of at least `least` children by name; in a model without lists, sequences of modules of one class."""
    named = list(model.named_modules())
    lists = [(name, one) for name, one in named if isinstance(one, nn.ModuleList) and len(one)]
    sequences = [
        (name, one) for name, one in named if isinstance(one, nn.Sequential) and len(set(map(type, one))) == 1
    ]
    return [(name, one) for name, one in lists or sequences if len(one) >= least]


def blocks_of(model: nn.Module, stack: str) -> list[nn.Module]:
    """The blocks of a stack, by index."""
    return list(cast("nn.ModuleList | nn.Sequential", model.get_submodule(stack)))


def kind_of(block: nn.Module) -> tuple[object, ...]:
    """Facts that blocks which compute alike have in common: class, names and shapes of parameters, settings of their modules.

    Attributes that name a block's place in the stack (`layer_idx`) differ between all blocks and are left out.
    """
    shapes = tuple((name, tuple(parameter.shape), parameter.dtype) for name, parameter in block.named_parameters())
    settings = tuple(
        (path, type(module), name, value)
        for path, module in block.named_modules()
        for name, value in sorted(vars(module).items())
        if type(value) in (int, bool, str, type(None)) and not any(word in name for word in PLACES)
    )
    return type(block), shapes, settings


def choose_stack(model: nn.Module, candidates: Sequence[str], calls: Mapping[str, Sequence[int]]) -> str:
    """The first candidate whose blocks ran exactly once each, in index order; else the first that left some out.

    Args:
        model: the model.
        candidates: names from `candidate_stacks`, likeliest first.
        calls: candidate -> indices of its blocks in the order they ran in one forward.

    Raises:
        PlanError: No candidate ran at least two blocks, once each in order; names the likeliest one and its order.
    """
    rising = [name for name in candidates if _is_rising(calls.get(name, ()))]
    for name in rising:
        if len(calls[name]) == len(blocks_of(model, name)):
            return name
    # Leaving blocks out is normal for blocks that need an input (images) that is not there; a list of which only part
    # is a repeated stack is not, so the likeliest candidate that ran at all must be the one.
    ran = [name for name in candidates if calls.get(name)]
    if ran and ran[0] in rising:
        return ran[0]
    name = ran[0] if ran else candidates[0]
    raise PlanError(order_problem(model, name, list(calls.get(name, ()))))


def _is_rising(order: Sequence[int]) -> bool:
    return len(order) > 1 and all(before < after for before, after in itertools.pairwise(order))


def order_problem(model: nn.Module, name: str, order: list[int]) -> str:
    """Why a stack that ran in `order` cannot be cut."""
    count = len(blocks_of(model, name))
    shown = ",".join(map(str, order[:SHOWN])) + (",..." if len(order) > SHOWN else "")
    head = f"cannot pipeline {type(model).__name__}: "
    if len(set(order)) < len(order):
        return (
            f"{head}its blocks '{name}' run more than once per forward (order {shown}); a pipeline stage needs every "
            "block exactly once. Use tensor parallel or ZeRO instead."
        )
    missing = [j for j in range(count) if j not in order]
    if missing:
        return (
            f"{head}block {missing[0]} of '{name}' did not run on this input (blocks that ran: {shown or 'none'} of "
            f"{count}); discover with the inputs you train on."
        )
    return (
        f"{head}its blocks '{name}' run in the order {shown}; a pipeline stage needs them in the order of their index. "
        "Use tensor parallel or ZeRO instead."
    )
