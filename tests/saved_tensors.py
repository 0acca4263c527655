"""How much memory autograd keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved(model: nn.Module, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of distinct storages that `forward` saves for a backward, parameters and buffers left out; and what it returns."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), outputs


def saved_bytes(model: nn.Module, batch: dict[str, Any]) -> int:
    """Of one training forward, whose backward follows."""
    total, outputs = saved(model, lambda: model(**batch, use_cache=False))
    outputs.loss.backward()
    return total
