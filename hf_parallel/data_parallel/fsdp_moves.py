"""Moves and casts of a model whose parameters are in parts (`model.to()`, `model.cpu()`, `model.half()`).

torch would put new tensors in place of the parts, which optimizer and `fully_shard` refer to, and ends with an error that names
no cause. Where nothing is to be moved or cast, nothing is done, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import MethodType

import torch
from torch import Tensor, nn

from hf_parallel.data_parallel.fsdp_parts import local_of
from hf_parallel.errors import UnsupportedError


def refuse_moves(model: nn.Module) -> None:
    """Let `model.to()` and its like say why the parameters of this model stay what they are."""
    vars(model)["_apply"] = MethodType(_apply, model)


def _apply(model: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    tensors = chain(model.parameters(recurse), model.buffers(recurse))
    with torch.no_grad():
        if all(_stays(here, fn(here)) for here in map(local_of, tensors)):
            return model
    raise UnsupportedError(
        "model.to(), .cpu(), .half() or the like on a prepared model with zero.stage: 3 or engine: fsdp2: each rank has parts of its "
        "parameters, in memory that the optimizer and fully_shard refer to, so they stay on their device and in their dtype. Move or "
        "cast the model before it is prepared; for the whole weights call accelerator.get_state_dict(model) on every rank, which gives "
        "them to rank 0 in host memory; or set zero.stage to 1 or 2 of the native engine."
    )


def _stays(here: Tensor, made: Tensor) -> bool:
    """Whether a tensor was neither moved nor cast; to `cpu:0`, as a Trainer names it, torch makes a copy of one on `cpu`."""
    return (made.device, made.dtype) == (here.device, here.dtype)
