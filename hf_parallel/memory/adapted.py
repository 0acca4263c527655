"""Adapters for recorded steps: LoRA as PEFT runs it, of which it takes nothing but the sequence of operations."""

from __future__ import annotations

import types
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


SCALE: Final = 2.0


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model on `meta` and put LoRA of a rank on its linear layers but the head, as PEFT's "all-linear" does.

    The layers stay the modules that they are, so that what they take is still told apart by their names.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    model.requires_grad_(requires_grad=False)
    for module in model.modules():
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
            _put_beside(module, rank)


def _put_beside(module: nn.Module, rank: int) -> None:
    weight: Any = module.weight
    outputs, inputs = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
    # PEFT leaves adapters in fp32 whatever the model is in.
    module.lora_A = nn.Parameter(torch.empty(rank, inputs, dtype=torch.float32, device="meta"))
    module.lora_B = nn.Parameter(torch.empty(outputs, rank, dtype=torch.float32, device="meta"))
    stock = module.forward

    def forward(self: Any, tokens: Tensor) -> Tensor:  # named so: the meter looks for the module of such a frame
        result: Tensor = stock(tokens)
        beside = F.linear(F.linear(tokens.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return (result + beside * SCALE).to(result.dtype)

    module.forward = types.MethodType(forward, module)
