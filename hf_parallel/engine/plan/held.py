"""Lists the part of a model that one rank holds, by the ledger: tensors once it is cut, sizes before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import nn

from hf_parallel.compat.private_torch import own_buffers
from hf_parallel.compat.torch_tools import stored_bytes
from hf_parallel.errors import PlanError
from hf_parallel.ledger import Ledger
from hf_parallel.pipeline_parallel.plan.predict_cut import Holding


Table: TypeAlias = dict[str, torch.Tensor | None]  # buffers of one module


def held_tensors(
    model: nn.Module, ledger: Ledger, pp_rank: int
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Ledger name -> the tensor this rank holds; everything else that is still real is frozen.

    Raises:
        PlanError: The ledger expects a tensor here that the model does not have.
    """
    real = dict(model.named_parameters(remove_duplicate=False))
    real_buffers = dict(model.named_buffers(remove_duplicate=False))
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for entry in ledger.held_by(pp_rank):
        source: Mapping[str, torch.Tensor] = real if entry.kind == "param" else real_buffers
        tensor = next((source[alias] for alias in entry.aliases if alias in source), None)
        if tensor is None:
            raise PlanError(
                f"{entry.name} was planned for pipeline rank {pp_rank}, but is no longer in the model. Change a model before it is "
                "prepared, not meanwhile."
            )
        if isinstance(tensor, nn.Parameter):
            parameters[entry.name] = tensor
        else:
            buffers[entry.name] = tensor
    held = {id(parameter) for parameter in parameters.values()}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.requires_grad_(False)
    return parameters, buffers


def places_of(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[str, tuple[Table, str]]:
    """Ledger name -> where the buffer stands; user code may put another tensor there (`module.mean = new`)."""
    tables = [own_buffers(module) for module in model.modules()]
    places = {id(buffer): (table, key) for table in reversed(tables) for key, buffer in table.items()}
    return {name: places[id(buffer)] for name, buffer in buffers.items()}


def holding_of(model: nn.Module, ledger: Ledger, pp_rank: int, parts: int, copies: int = 1) -> Holding:
    """Bytes that the first rank of a pipeline stage will keep of a model that is still whole.

    Args:
        model: The model.
        ledger: Its ledger.
        pp_rank: Pipeline rank.
        parts: Ranks over which sharded parameters are spread.
        copies: Factor by which a rank keeps more of the experts' optimizer state than of others', where replicas share both.
    """
    tensors = _named(model)
    trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
    count = weights = learned = more = 0
    for entry in ledger.held_by(pp_rank):
        elements, size = math.prod(entry.shape), stored_bytes(tensors[entry.name])
        if entry.spec is not None:
            part = entry.spec.local_size(parts, 0)
            elements, size = (each // entry.spec.full_size * part for each in (elements, size))
            more += (copies - 1) * size * (entry.name in trained)
        count += elements * (entry.kind == "param")
        weights += size
        learned += size * (entry.name in trained)
    return Holding(count, weights, learned, 2 * (learned + more))


def whole_bytes(model: nn.Module, ledger: Ledger) -> int:
    """Bytes of the parameters and saved buffers of a model that is still whole."""
    tensors = _named(model)
    return sum(stored_bytes(tensors[entry.name]) for entry in ledger)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
