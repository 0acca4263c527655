"""Adapters for recorded steps: LoRA as PEFT runs it, of which it takes nothing but the sequence of operations."""

from __future__ import annotations

import types
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


SCALE: Final = 2.0


def adapt(model: nn.Module, rank: int, *, on_experts: bool = False) -> None:
    """Freeze a model on `meta` and put LoRA of a rank on its linear layers but the head, as PEFT's "all-linear" does.

    The layers stay the modules that they are, so that what they take is still told apart by their names.

    Args:
        model: The model.
        rank: Rank of the adapters.
        on_experts: Whether stacks of experts have them, too, as with PEFT's `target_parameters`.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    model.requires_grad_(requires_grad=False)
    for module in model.modules():
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
            _put_beside(module, rank)
        elif on_experts and (
            stacks := [name for name, p in module.named_parameters(recurse=False) if p.ndim == len("ewh")]
        ):
            _add_to_weights(module, stacks, rank)


def _add_to_weights(module: nn.Module, names: list[str], rank: int) -> None:
    """LoRA that is added up with the frozen weights for each forward, which then computes with the sum."""
    factors = {}
    for name in names:
        experts, rows, columns = module.get_parameter(name).shape
        shapes = (experts, rows, rank), (experts, rank, columns)
        pair = [nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta")) for shape in shapes]
        factors[name] = [f"lora_{name}_{part}" for part in "BA"]
        for path, one in zip(factors[name], pair, strict=True):
            module.register_parameter(path, one)
    stock = module.forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        own = vars(self)
        for name, (left, right) in factors.items():
            weight = self.get_parameter(name)
            pair = (self.get_parameter(path).to(weight.dtype) for path in (left, right))
            with torch.autocast(weight.device.type, enabled=False):  # a sum is of the dtype of the weight, as in PEFT
                own[name] = torch.baddbmm(weight, *pair, alpha=SCALE)  # found before the parameter
        try:
            return stock(*given, **named)
        finally:
            for name in factors:
                del own[name]

    module.forward = types.MethodType(forward, module)


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
