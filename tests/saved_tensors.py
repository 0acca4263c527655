"""How much memory autograd keeps between forward and backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(model: nn.Module, batch: dict[str, Any]) -> int:
    """Bytes of distinct storages that one training forward saves for its backward, parameters and buffers left out."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch, use_cache=False).loss
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return total
