"""Models and batches by name, built from the configuration class alone: no weights, no network."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from zoo.overrides import DROP, LENGTH_MULTIPLE, OVERRIDES, PART, VARIANTS, Settings
from zoo.shrink import BLOCKS, FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN, shrink


def all_types() -> list[str]:
    """Every type of `AutoModelForCausalLM`, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def entries() -> list[str]:
    """Every type, then every variant (`type@variant`)."""
    return [*all_types(), *sorted(VARIANTS)]


def type_of(name: str) -> str:
    return name.split("@")[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the advice that configurations and models print about unusual settings."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            hf_logging.set_verbosity(level)


def tiny_config(name: str) -> Any:
    """The tiny configuration of an entry; made twice, so that derived fields are the configuration's own."""
    kind = CONFIG_MAPPING[type_of(name)]
    settings = {**OVERRIDES.get(type_of(name), {}), **VARIANTS.get(name, {})}
    blocks = settings.pop("blocks", BLOCKS)
    with quiet():
        arguments = shrink(kind(**settings.pop("default", {})), blocks)
        for key, value in settings.items():
            _put(arguments, key, value)
        arguments.pop("model_type", None)
        config = kind(**arguments)
    return getattr(config, PART[type_of(name)]) if type_of(name) in PART else config


def _put(arguments: Settings, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for step in path:
        arguments = arguments.setdefault(step, {})
    if value is DROP:
        arguments.pop(last, None)
    else:
        arguments[last] = value


def build(name: str, seed: int = 0) -> nn.Module:
    """A tiny model of an entry in training mode, with fixed weights and no constant or uninitialised parameter."""
    torch.manual_seed(seed)
    with quiet():
        model: nn.Module = _class_of(name)(tiny_config(name), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                _enliven(parameter, generator)
    return model.train()


def _class_of(name: str) -> Callable[..., Any]:
    if type_of(name) not in PART:
        return AutoModelForCausalLM.from_config  # type: ignore[no-any-return]
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[type_of(name)])._from_config  # type: ignore[no-any-return]


def _enliven(parameter: Tensor, generator: torch.Generator) -> None:
    """A constant (zero biases, unit norms) could hide a lost term; what is not finite was never initialised."""
    noise = 0.02 * torch.randn(parameter.shape, generator=generator)
    if not bool(torch.isfinite(parameter).all()):
        parameter.copy_(noise)
    elif parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
        parameter.add_(noise)


def batch(name: str, model: nn.Module, rows: int = 2, length: int = 8, *, left: bool = False) -> dict[str, Any]:
    """Keyword arguments of one training forward: ids, mask, labels i64[rows length], and what the type insists on.

    The last row is padded by 3 positions on one side; two labels of the first row are -100.
    """
    multiple = LENGTH_MULTIPLE.get(type_of(name), 1)
    length = -(-length // multiple) * multiple
    generator = torch.Generator().manual_seed(1000 * rows + length)
    ids = torch.randint(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN + 1, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, (slice(0, 3) if left else slice(-3, None))] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 1:3] = -100
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    return made | _extras(name, model, made, generator)


def _extras(name: str, model: Any, made: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Inputs beyond text of the few types that need them, and the router switch where it is no configuration field."""
    config, rows = model.config, made["input_ids"].shape[0]
    extras: dict[str, Any] = {}
    accepted = inspect.signature(model.forward).parameters
    if "output_router_logits" in accepted and not hasattr(config.get_text_config(), "output_router_logits"):
        extras["output_router_logits"] = True
    if type_of(name) in PART:  # one row of ids for each codebook, labels i64[rows length codebooks]
        extras["input_ids"] = made["input_ids"].repeat_interleave(config.num_codebooks, 0)
        extras["labels"] = made["labels"].unsqueeze(-1).expand(-1, -1, config.num_codebooks).contiguous()
    if name == "git":  # it always prepends its image
        size = config.vision_config.image_size
        extras["pixel_values"] = torch.randn(rows, 3, size, size, generator=generator)
    if name == "mllama@cross":
        width = config.get_text_config().hidden_size
        extras["cross_attention_states"] = torch.randn(rows, 6, width, generator=generator)
    return extras


def why_not(name: str) -> str | None:
    """Why an entry cannot be trained on text, whole, on one process: the exception it raises; None if it can."""
    try:
        model = build(name)
        loss = model(**batch(name, model)).loss
        loss.backward()
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {first_line}"
    return None if bool(torch.isfinite(loss)) else f"its loss is {float(loss)}"
