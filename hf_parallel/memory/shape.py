"""The numbers of a model, counted on the meta device: no weights are read and no memory is taken."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.memory.terms import ModelShape, Precision
from hf_parallel.memory.unread import build_on_meta, first_line
from hf_parallel.memory.variant import PLAIN, Variant
from hf_parallel.memory.widths import numbers_beside, width_of
from hf_parallel.model.layer_configs import config_of_layer
from hf_parallel.settings.file import parse_json, read_bounded
from hf_parallel.settings.values import shown, spelled


logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES: Final = 1 << 22  # names of labels make some long
# What a model makes a module of each of.
COUNTS: Final = frozenset(
    {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_local_experts", "num_experts"}
)
MAX_MODULES: Final = 4096


def shape_of(name_or_path: str, precision: Precision | None = None, variant: Variant = PLAIN) -> ModelShape:
    """The shape of a causal language model.

    Args:
        name_or_path: A `config.json`, a folder with one, or a name that transformers can look up.
        precision: Precision in which the activations of a block are traced; None counts them as Llama's.
        variant: See `record_step`.

    Raises:
        ConfigError: There is no such config, or no causal language model for it.
    """
    return shape_of_config(config_of(name_or_path), precision, variant)


def config_of(name_or_path: str, *, trains: bool = False) -> Any:
    """The transformers config that a `config.json`, a folder with one, or a name stands for.

    Of a model that brings modeling code of its own (`auto_map`), transformers' class of the same model type is meant, which is
    said once.

    Args:
        name_or_path: Name, folder or file of a config.
        trains: Whether the model is trained with it: then modeling code of its own is refused.

    Raises:
        ConfigError: There is no such config, or the model would be another one.
    """
    from transformers import AutoConfig

    path = Path(os.path.expanduser(name_or_path))
    try:
        exists = path.exists()
        if not exists and path.suffix == ".json":
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise ConfigError(
                f"model {spelled(name_or_path)}: no config found: there is no such file{where}. Give a config.json, or a folder with one."
            )
        if exists:
            _refuse_odd_file(path / "config.json" if path.is_dir() else path)
        config = AutoConfig.from_pretrained(str(path) if exists else name_or_path, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a config class raises what it likes on values of odd types
        raise ConfigError(
            f"model {spelled(name_or_path)}: no config found ({first_line(error)}). Give a config.json, a folder with one, or the name of a "
            "model that is in the cache or can be downloaded."
        ) from None
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own and trains:
        raise ConfigError(
            f"model {spelled(name_or_path)}: it brings modeling code of its own (auto_map: {spelled(own)}), and what would be trained is "
            f"transformers' own class of model type {spelled(config.model_type)}. Give the script that loads it: --script train.py."
        )
    if own:
        _note_own_code(name_or_path, own, config.model_type)
    return config


@functools.cache
def _note_own_code(name_or_path: str, own: str, model_type: str) -> None:
    """Say it once in a process."""
    logger.warning(
        f"model {spelled(name_or_path)}: it brings modeling code of its own (auto_map: {spelled(own)}), which is not run. Numbers are of "
        f"transformers' own class of model type {spelled(model_type)}."
    )


def _refuse_odd_file(file: Path) -> None:
    """Refuse what is no JSON file, or would build modules without end."""
    if not file.exists():
        return  # transformers says what it looked for
    content = parse_json(read_bounded(file, MAX_CONFIG_BYTES, "a config.json"), file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a mapping. Give the config.json of a model.")
    for section in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key, value in section.items():
            if key in COUNTS and isinstance(value, int) and value > MAX_MODULES:
                raise ConfigError(
                    f"{file}: {key}={spelled(value)}: at most {MAX_MODULES} modules are counted. Correct the file."
                )


def shape_of_config(config: Any, precision: Precision | None = None, variant: Variant = PLAIN) -> ModelShape:
    """The shape of the model that `AutoModelForCausalLM` builds from a transformers config.

    Args:
        config: The config; it is not changed.
        precision: Precision, as for `shape_of`.
        variant: As for `shape_of`; of a model that cannot run with its checkpointing, a step without it is recorded.

    Raises:
        ConfigError: It builds none, or the config names its widths in no usual way.
    """
    from hf_parallel.memory.block import trace_block  # brings torch
    from hf_parallel.memory.record import record_step

    model, text = build_on_meta(config), config.get_text_config()
    hidden, layers = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    head = 0 if output is None else output.weight.numel()
    recorded = None if precision is None else record_step(config, precision, variant)
    if precision is not None and recorded is None and variant.checkpoint is not None:
        recorded = record_step(config, precision, replace(variant, checkpoint=None))
    saved = None if precision is None or recorded is not None else trace_block(config, precision)
    first = config_of_layer(text, 0)
    heads = getattr(first, "num_attention_heads", None) or (
        _number(first, "num_attention_heads") if saved is None and recorded is None else 0
    )
    head_dim = getattr(first, "head_dim", None) or hidden // max(1, heads)
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    stacks = _in_stacks(model)
    positions = positions_of(model)
    block = (sum(sizes.values()) - embedding.numel() - positions - (0 if tied else head)) / layers
    wide, attention = width_of(first, hidden), 2 * hidden * head_dim * (heads + kv_heads)
    return ModelShape(
        parameters=sum(sizes.values()),
        layers=layers,
        hidden=hidden,
        intermediate=wide,
        vocab=embedding.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        embedding=embedding.numel() + positions,
        head=head,
        tied=tied,
        gated=block - attention > 2.5 * hidden * wide,
        largest=max(sizes.values()),
        experts=sum(sizes[name] for name in stacks) / layers,
        expert_width=min((size for name in stacks for size in _widths(model, name, hidden)), default=0),
        saved=saved,
        recorded=recorded,
        numbers=numbers_beside(model, wide),
        positions=positions,
    )


def positions_of(model: Any) -> int:
    """Parameters of tables outside of the blocks beside that of the tokens and the head: learned positions."""
    from torch import nn

    from hf_parallel.model.stack import blocks_of, candidate_stacks

    stacks = candidate_stacks(model)
    inside = {id(module) for block in (blocks_of(model, stacks[0]) if stacks else ()) for module in block.modules()}
    own = {id(one) for one in (model.get_input_embeddings(), model.get_output_embeddings())}
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding) and id(one) not in inside | own)
    return sum(one.weight.numel() for one in tables)


def _in_stacks(model: Any) -> set[str]:
    """Parameters of modules that own stacks of matrices, one for each expert; those have one first dim."""
    found = set()
    for path, module in model.named_modules():
        own = {f"{path}.{name}": p for name, p in module.named_parameters(recurse=False)}
        counts = {len(p) for p in own.values() if p.ndim >= 3}
        if len(counts) == 1 and not type(module).__module__.startswith("torch.nn"):
            found |= {name for name, p in own.items() if p.ndim and {len(p)} == counts}
    return found


def _widths(model: Any, name: str, hidden: int) -> list[int]:
    """Widths of the feed-forward part of an expert that a stack has beside that of the residual stream; that of a gate is double."""
    shape = model.get_parameter(name).shape
    return [size for size in shape[1:] if size != hidden] or [hidden] if len(shape) == len("ewh") else []


def _number(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"the config of {config.model_type!r} has {key}={shown(value)}: memory is counted from an integer. Add it to the "
            "config, or leave out --model."
        )
    return value
