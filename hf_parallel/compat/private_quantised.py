"""Names of libraries that quantise weights, found on the modules that they put into a model."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def keep_trainable(model: nn.Module) -> None:
    """Stop layers of 4 bit from repacking their weights when the model is evaluated.

    bitsandbytes 0.50 does so on CPUs with AVX512-BF16, and a training step after that has no gradients through the layer.
    Planning runs the model in evaluation mode too.
    """
    module: Any
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            module.support_avx512bf16_for_cpu = False


def forget_scales(module: Any) -> None:
    """Let go of what a layer keeps of its quantised weight (scales; in 8 bit the values too), after that was taken out."""
    if vars(module).get("quant_state") is not None:
        module.quant_state = None
    state = vars(module).get("state")
    if getattr(state, "CB", None) is not None:
        state.CB = state.SCB = None


def quantised_bits(module: nn.Module) -> float:
    """Bits of a value of the quantised matrices of a module and its children, with half a bit for scales; 0 if there are none."""
    packed = [p for p in module.parameters() if not (p.is_floating_point() or p.is_complex())]
    total = quantised_elements(module)
    return 8 * sum(p.numel() * p.element_size() for p in packed) / total + 0.5 if total else 0.0


def quantised_elements(module: nn.Module) -> int:
    """Values of the quantised matrices of a module and its children, unpacked."""
    total = 0
    for parameter in module.parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            state: Any = vars(parameter).get("quant_state")
            total += parameter.numel() if state is None else math.prod(state.shape)
    return total
