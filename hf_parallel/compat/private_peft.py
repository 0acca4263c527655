"""Names of PEFT, which is looked up only where somebody has imported it: a model has adapters only then."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn


def tuner_layers(model: nn.Module) -> dict[str, Any]:
    """Modules that add something trained to the layer that they hold as `base_layer`, by name."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, peft.BaseTunerLayer)}


def merge_elsewhere(layer: Any) -> None:
    """Let a tuner layer whose weights another rank holds note that it is merged, or no longer, and compute nothing."""
    from peft.tuners.tuners_utils import check_adapters_to_merge

    def merge(safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        layer.merged_adapters.extend(check_adapters_to_merge(layer, adapter_names))

    vars(layer).update(merge=merge, unmerge=layer.merged_adapters.clear)


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the tuner layers of a model run their base layers alone; whether anything is trained is not touched."""
    layers = list(tuner_layers(model).values())
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def base_model(model: nn.Module) -> nn.Module:
    """The model that adapters were put on; any other model itself."""
    base = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    found: nn.Module = base() if callable(base) else model
    return found


def with_adapters_of(model: Any, base: nn.Module) -> nn.Module:
    """A model of the class of `base_model(model)` with adapters as `model` has, of random weights; a model without any itself.

    Raises:
        Exception: PEFT's own, for adapters that cannot be put on it.
    """
    if base_model(model) is model:
        return base
    from peft import get_peft_model

    configs = {name: copy.deepcopy(config) for name, config in model.peft_config.items()}
    for config in configs.values():
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # else products with B are zero, and some ways change the weights below
    first, *others = configs
    with warnings.catch_warnings():
        # It warned when the real ones were put on; with few blocks it misses those that patterns of a config name, too.
        warnings.simplefilter("ignore")
        made: Any = get_peft_model(base, configs[first], adapter_name=first)
        for name in others:
            made.add_adapter(name, configs[name])
    if made.base_model.active_adapter != model.base_model.active_adapter:  # somebody has chosen
        made.set_adapter(model.active_adapter)
    found: nn.Module = made
    return found


def is_mixed(model: nn.Module) -> bool:
    """Whether it is a model with adapters of several methods (`get_peft_model(..., mixed=True)`)."""
    peft: Any = sys.modules.get("peft.mixed_model")
    return peft is not None and isinstance(model, peft.PeftMixedModel)


def trained_copy(module: Any) -> Any:
    """The module that runs in the place of a module of `modules_to_save`; any other module itself."""
    peft: Any = sys.modules.get("peft.utils.other")
    if peft is None or not isinstance(module, peft.ModulesToSaveWrapper) or not module.active_adapters:
        return module
    return module.modules_to_save[module.active_adapters[0]]


def why_not_low_rank(layer: Any) -> str:
    """Why a tuner layer is not plain LoRA on a linear layer or an embedding; empty if it is."""
    from peft.tuners.lora import layer as lora

    kind = type(layer)
    if isinstance(layer, lora.ParamWrapper):
        return f"it adapts the parameter {layer.parameter_name} (target_parameters, which all-linear sets for experts)"
    if kind not in (lora.Linear, lora.Embedding):
        return f"it is a {kind.__module__.removeprefix('peft.tuners.')}.{kind.__name__}"
    if any(layer.use_dora.values()):
        return "use_dora: true normalises by columns of the whole weight"
    variants = sorted({type(variant).__name__ for variant in layer.lora_variant.values()})
    if variants:
        return f"it is the variant {', '.join(variants)} of LoRA"
    return "its adapter is merged" if layer.merged else ""
