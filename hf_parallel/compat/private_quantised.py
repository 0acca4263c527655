"""Names of libraries that quantise weights, found on the modules that they put into a model."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn


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


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of a tensor; of a matrix in 4 bit that of its values, unpacked."""
    state: Any = vars(tensor).get("quant_state") if isinstance(tensor, nn.Parameter) else None
    return tensor.shape if state is None else torch.Size(state.shape)


def quantise_as(made: nn.Module, model: nn.Module) -> None:
    """Put layers of 4 bit of bitsandbytes into a model where another one of the same structure has them. In place.

    Args:
        made: A model of plain linear layers.
        model: The other one; adapters may be around its layers.
    """
    library: Any = sys.modules.get("bitsandbytes")
    kind = () if library is None else library.nn.Linear4bit
    layers = {name.replace(".base_layer", ""): one for name, one in model.named_modules() if isinstance(one, kind)}
    for name, layer in layers.items():
        made.set_submodule(name, _in_4_bit(made.get_submodule(name), layer, library))
    marks = ("is_loaded_in_4bit", "is_quantized", "quantization_method", "hf_quantizer")  # which PEFT reads
    vars(made).update({mark: vars(model)[mark] for mark in marks if layers and mark in vars(model)})


def _in_4_bit(plain: Any, layer: Any, library: Any) -> Any:
    """The values of a linear layer, quantised as another layer is."""
    how: Any = layer.weight
    packing = {key: getattr(how, key) for key in ("compress_statistics", "quant_type", "quant_storage")}
    made = type(layer)(
        *(plain.in_features, plain.out_features, plain.bias is not None), compute_dtype=layer.compute_dtype, **packing
    )
    values = plain.weight.detach().to(how.quant_state.dtype)
    packed = type(how)(values, requires_grad=False, blocksize=how.blocksize, module=made, **packing)
    made.weight, made.bias = packed.to(how.device), plain.bias
    numbers = {key: value for key, value in vars(layer).items() if isinstance(value, bool)}
    vars(made).update(numbers)
    return made
