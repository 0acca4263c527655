"""Parameters that several modules share: they are stored alike by all of these, or their pairs are given up."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.plan.candidates import Draft


def tied_modules(model: nn.Module) -> dict[str, str]:
    """Module -> a different module that owns one of the same parameters."""
    shared = [names for names in _owners(model).values() if len(set(names)) > 1]
    return {name: next(other for other in names if other != name) for names in shared for name in names}


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Id of a parameter -> names of the modules that own it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in own_parameters(module).values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def drop_unequal_ties(draft: Draft) -> None:
    """Give up pairs whose linears share a parameter with a module that does not store it in the same way."""
    while True:
        unequal = set()
        for names in _owners(draft.model).values():
            if len(set(names)) > 1 and len({repr(draft.plans.get(name)) for name in names}) > 1:
                unequal |= {name for name in names if name in draft.plans}
        if not unequal:
            return
        for pair in [pair for pair in draft.pairs if unequal & {*pair.columns, pair.row}]:
            draft.pairs.remove(pair)
            unequal |= {*pair.columns, pair.row}
        for name in unequal & set(draft.plans):
            del draft.plans[name]
            if name in draft.tied:
                draft.reasons[name] = (
                    f"replicated: its parameter is tied to {draft.tied[name]}, which is used otherwise"
                )


def aliases_of(model: nn.Module, stored: Mapping[str, ShardSpec]) -> dict[str, tuple[str, ...]]:
    """Name of each of the `stored` tensors that has several -> the others."""
    names: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), []).append(name)
    groups = [group for group in names.values() if len(group) > 1]
    return {
        name: tuple(other for other in group if other != name) for group in groups for name in group if name in stored
    }
