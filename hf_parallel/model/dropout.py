"""Switching dropout off around some calls, without leaving training mode and without touching anything shared.

A torch function mode sees the calls of its own thread only: another thread that draws dropout meanwhile (augmentation in a
data loader) is not affected, and `torch.nn.functional` stays as it is.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode


DROPOUTS = frozenset(
    {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    }
)
RATE = 4  # place of dropout_p among the arguments of scaled_dot_product_attention


class NoDropout(TorchFunctionMode):
    """Inside, in this thread, dropout functions return their input and attention keeps all of its weights.

    Backward passes that begin inside are included, so a checkpointed block that runs again does so without dropout too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > RATE:
                args = (*args[:RATE], 0.0, *args[RATE + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        elif func is functional.multi_head_attention_forward:  # it calls the others where this mode is off
            given = inspect.signature(func).bind(*args, **kwargs)
            given.arguments["dropout_p"] = 0.0
            args, kwargs = given.args, given.kwargs
        # torch switches a mode off while it handles a call, which for a backward pass is all of it.
        elif func is Tensor.backward:
            gradient = kwargs.pop("gradient", None)
            with self:
                return torch.autograd.backward(args[0], gradient, **kwargs)
        elif func is torch.autograd.backward and kwargs.get("inputs") is None:
            # A call without tensors asks no mode.
            edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in args[0]]
            with self:
                return torch.autograd.backward(edges, **kwargs)
        return func(*args, **kwargs)
