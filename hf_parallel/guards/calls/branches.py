"""Outputs of a model that its loss, or its logits, do not come from on this mesh, as they do in one process.

They are gathered, or made on another rank, beside the graph of the loss. What user code computes from them adds to the
gradients as in one process, but a hook on them would not change the gradient of the loss, and their `grad` would lack it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from hf_parallel.errors import UnsupportedError
from hf_parallel.model.tensors import tensors_in


def refuse_hooks(outputs: Mapping[str, Any], axis: str) -> None:
    """Let tensors of these outputs refuse hooks, and to keep their gradient.

    Args:
        outputs: Name -> tensors; those without a graph refuse as torch lets them.
        axis: The setting that makes them branches, with its value.
    """
    for name, value in outputs.items():
        for tensor in tensors_in(value):
            if tensor.requires_grad and torch.is_grad_enabled():
                for method in ("register_hook", "retain_grad"):
                    setattr(tensor, method, functools.partial(_refuse, method, name, axis))


def _refuse(method: str, name: str, axis: str, *args: object) -> NoReturn:
    raise UnsupportedError(
        f"{method} on outputs.{name} with {axis}: these tensors are made beside the graph of the loss, so a hook would not change what "
        "the model gets, and their grad would lack what the loss gives. Register a forward hook that does it on the module that "
        f"computes them, before trainer.train() or accelerator.prepare(), or set {axis.partition('=')[0]} to 1."
    )
