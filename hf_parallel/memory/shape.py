"""The numbers of a model, counted on the meta device: no weights are read and no memory is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_parallel.errors import ConfigError
from hf_parallel.memory.block import trace_block
from hf_parallel.memory.layout import ModelShape, Precision


def shape_of(name_or_path: str, precision: Precision | None = None) -> ModelShape:
    """The shape of a causal language model.

    Args:
        name_or_path: A `config.json`, a folder with one, or a name that transformers can look up.
        precision: In which the activations of a block are traced; None counts them as Llama's.

    Raises:
        ConfigError: There is no such config, or no causal language model for it.
    """
    from transformers import AutoConfig

    path = Path(name_or_path).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(path) if path.exists() else name_or_path)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model {name_or_path!r}: no config found ({reason}). Give a config.json, a folder with one, or the name of a "
            "model that is in the cache or can be downloaded."
        ) from None
    return shape_of_config(config, precision)


def shape_of_config(config: Any, precision: Precision | None = None) -> ModelShape:
    """The shape of the model that `AutoModelForCausalLM` builds from a transformers config.

    Args:
        config: The config; it is not changed.
        precision: As for `shape_of`.

    Raises:
        ConfigError: It builds none, or the config names its widths in no usual way.
    """
    model, text = _on_meta(config), config.get_text_config()
    hidden, layers = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    head = 0 if output is None else output.weight.numel()
    saved = None if precision is None else trace_block(config, precision)
    heads = getattr(text, "num_attention_heads", None) or (
        _number(text, "num_attention_heads") if saved is None else 0
    )
    head_dim = getattr(text, "head_dim", None) or hidden // max(1, heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    block = (sum(sizes.values()) - embedding.numel() - (0 if tied else head)) / layers
    wide, attention = _intermediate(text, hidden), 2 * hidden * head_dim * (heads + kv_heads)
    return ModelShape(
        parameters=sum(sizes.values()),
        layers=layers,
        hidden=hidden,
        intermediate=wide,
        vocab=embedding.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        embedding=embedding.numel(),
        head=head,
        tied=tied,
        gated=block - attention > 2.5 * hidden * wide,
        largest=max(sizes.values()),
        saved=saved,
    )


def _on_meta(config: Any) -> Any:
    """The model without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"model type {config.model_type!r} cannot be built from its config: {str(error).strip().splitlines()[0]} "
            "Give the config of a causal language model."
        ) from None


def _number(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int):
        raise ConfigError(
            f"the config of {config.model_type!r} has {key}={value!r}: memory is counted from an integer. Add it to the "
            "config, or leave out --model."
        )
    return value


def _intermediate(config: Any, hidden: int) -> int:
    """Width that a token passes: of a dense part, or of all experts that it is routed to."""
    experts = getattr(config, "num_experts_per_tok", None)
    width = getattr(config, "moe_intermediate_size", None) if experts else None
    width = width or next(
        (v for key in ("intermediate_size", "ffn_dim", "n_inner") if isinstance(v := getattr(config, key, None), int)),
        4 * hidden,
    )
    return int(width) * int(experts or 1)
