"""Losses that read what hooks of user code kept of modules that see a part of the sequence: such a term is one of the part.

The ranks of one model copy compare their losses, but terms of two parts may be equal, or too small to tell. So what the model goes
on with is an alias of what hooks have seen: where more than its gradient arrives, something else has read the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import version_of
from hf_parallel.errors import UnsupportedError
from hf_parallel.model.tensors import map_tensors


class KeptParts:
    """A forward hook, the last of a module with hooks of user code.

    Args:
        name: Name of the module.
        hooks: Names of the hooks that were there before.
        axis: The setting that leaves parts.
        is_part: Whether a tensor that the module returns is a part.
    """

    def __init__(self, name: str, hooks: Sequence[str], axis: str, is_part: Callable[[Tensor], bool]) -> None:
        self._is_part = is_part
        self._text = (
            f"the loss reads what a hook ({', '.join(hooks)}) kept of {name}, with {axis} above 1: on each rank that is a part of the "
            "sequence, and a term of the loss would be one of that part. Read outputs.hidden_states (output_hidden_states=True), which "
            f"are whole, or set {'tensor_parallel.sequence_parallel to false' if axis == 'tp_size' else 'sp_size to 1'}."
        )

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Watch the parts of a module's output; the model goes on with what this returns."""
        return map_tensors(self._watched, output) if torch.is_grad_enabled() else output

    def _watched(self, place: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None or not self._is_part(tensor):
            return tensor
        alias, seen = tensor.view_as(tensor), tensor.detach()
        before, arrived = version_of(seen), list[Tensor]()

        def compare(gradient: Tensor) -> None:
            alone = len(arrived) == 1 and arrived[0].data_ptr() == gradient.data_ptr()
            arrived.clear()
            if not alone and version_of(seen) == before:  # what was changed in place has another graph
                raise UnsupportedError(self._text)

        alias.register_hook(arrived.append)
        tensor.register_hook(compare)
        return alias
