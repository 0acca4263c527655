"""Tiny batches for discovery and the self-check, and the properties of a batch that change the path through a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.batches import IGNORED_LABEL
from hf_parallel.compat.private_peft import base_model
from hf_parallel.model.structure import leaves


# Read by the loss only, which the last stage computes with the model's own code.
LOSS_INPUTS = frozenset({"labels", "shift_labels", "num_items_in_batch"})
# Costs are compared at this length. Only attention changes with the length, and it is small below some thousand tokens.
TYPICAL_LENGTH = 512
# Settings, of the config or of a call, that change what blocks and model return.
OUTPUT_FLAGS = ("output_router_logits", "use_cache", "output_hidden_states", "output_attentions", "return_dict")


def signature_of(model: nn.Module, forward: Callable[..., Any] | None = None) -> inspect.Signature:
    """Signature of a model's forward, or of the wrapped model's where that takes `*args` and names none (PEFT's).

    Args:
        model: The model.
        forward: Its genuine forward; None for the one that it has.
    """
    found = inspect.signature(model.forward if forward is None else forward)
    nameless = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in found.parameters.values())
    return inspect.signature(base_model(model).forward) if nameless else found


def taken(signature: inspect.Signature, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that a forward takes: a user's may name few, such as `input_ids` and `labels`, and take no others."""
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    return {name: value for name, value in inputs.items() if takes_all or name in signature.parameters}


def tiny_samples(
    vocab_size: int, *, device: torch.device | str = "cpu", leads: bool = True, **fixed: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two batches of different (B, S) for the self-check: padded left and right, with -100 labels.

    Args:
        vocab_size: token ids are 0 .. vocab_size - 1.
        device: where the model is.
        leads: whether the second is padded left; both right else.
        fixed: further keyword arguments, the same in both, e.g. `use_cache=False`.
    """
    generator = torch.Generator().manual_seed(0)
    made: list[dict[str, Any]] = []
    for (rows, length), left in (((2, 8), False), ((3, 11), True)):
        ids = torch.randint(0, vocab_size, (rows, length), generator=generator)  # (batch, seq); so are mask and labels
        mask = torch.ones_like(ids)
        mask[-1, (slice(0, 3) if left and leads else slice(-3, None))] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, :2] = -100
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        made.append({name: t.to(device) for name, t in batch.items()} | fixed)
    return made[0], made[1]


def probe_samples(
    model: nn.Module, vocab_size: int, device: torch.device | str = "cpu", **fixed: Any
) -> list[dict[str, Any]]:
    """Batches for `discover_stages` with the sets of inputs that collators make.

    Returns:
        The base (`input_ids`, `attention_mask`, `labels`) first; then without `attention_mask`, with each of
        `position_ids` and `token_type_ids` that the model's forward names, and with both; only what it takes. That of a
        model with adapters passes on what its base names.
    """
    signature = signature_of(model)
    base = taken(signature, tiny_samples(vocab_size, device=device, **({"use_cache": False} | fixed))[0])
    ids: Tensor = base["input_ids"]
    extras = {
        "position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape),
        "token_type_ids": torch.zeros_like(ids),
    }
    named = inspect.signature(base_model(model).forward).parameters
    extras = {name: value for name, value in extras.items() if name in named}
    unmasked = {name: value for name, value in base.items() if name != "attention_mask"}
    samples = [base, unmasked] if "attention_mask" in base else [base]
    samples += [base | {name: value} for name, value in extras.items()]
    return samples + ([base | extras] if len(extras) > 1 else [])


def with_labels_of(model: Any, task: str, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of text as a model for another task than that of a language model takes it, without labels if they are not known.

    Args:
        model: With a config.
        task: Task in the name of its class, as "SequenceClassification".
        batch: With `input_ids` i[B S]; what its mask leaves out becomes padding, and each row ends with an end token: by
            these classifiers find what they score.
    """
    found = {name: value for name, value in batch.items() if name != "labels"}
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids, mask, generator = batch["input_ids"], batch.get("attention_mask"), torch.Generator().manual_seed(0)
    count = getattr(config, "num_labels", 0)
    found["input_ids"] = _as_texts(text, ids, torch.ones_like(ids) if mask is None else mask)
    if task == "TokenClassification" and count:
        labels = torch.randint(0, count, ids.shape, generator=generator).to(ids.device)
        found["labels"] = labels if mask is None else labels.masked_fill(mask == 0, IGNORED_LABEL)
    elif task == "SequenceClassification" and count:
        found["labels"] = _labels_of_rows(model, count, len(ids), generator).to(ids.device)
    return found


def _as_texts(text: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Ids i[B S] of which each row ends with the one token of its end, if a config names it, before or behind padding."""
    words = range(size if isinstance(size := getattr(text, "vocab_size", None), int) else 0)
    end: Any = getattr(text, "eos_token_id", None)
    padding: Any = getattr(text, "pad_token_id", None)
    if end in words:  # tiny models keep the end of a large vocabulary
        last = (torch.arange(ids.shape[1], device=ids.device) * mask).argmax(1, keepdim=True)
        ids = ids.masked_fill(ids == end, (end + 1) % len(words)).scatter(1, last, end)
    return ids.masked_fill(mask == 0, padding) if padding in words else ids


def _labels_of_rows(model: Any, count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Labels [B] or [B count] as transformers' loss takes them for the kind of problem that a config names or implies."""
    kind = getattr(model.config, "problem_type", None) or (
        "regression" if count == 1 else "single_label_classification"
    )
    if kind == "single_label_classification":
        return torch.randint(0, count, (rows,), generator=generator)
    shape = (rows,) if count == 1 and kind == "regression" else (rows, count)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def typical_shape(model: nn.Module) -> tuple[int, int]:
    """(B, S) of the batch that costs are counted or measured with: one row of 512 tokens, or of what the model takes."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return 1, min(TYPICAL_LENGTH, limit) if isinstance(limit, int) and limit > 0 else TYPICAL_LENGTH


def typical_sample(model: nn.Module, vocab_size: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """One full row of `typical_shape`, without padding, to measure with."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, typical_shape(model), generator=generator).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), "use_cache": False}
    return taken(signature_of(model), batch)


def path_inputs(inputs: Mapping[str, Any]) -> frozenset[str]:
    """Names of the inputs that hold tensors and may change the path through the model; those of the loss do not."""
    return frozenset(
        name
        for name, value in inputs.items()
        if name not in LOSS_INPUTS and (isinstance(value, Tensor) or next(leaves(value), None) is not None)
    )


def output_flags(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings of `OUTPUT_FLAGS` in effect in a call, of the call's arguments first, then of the config."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: list[tuple[str, Any]] = []
    for name in OUTPUT_FLAGS:
        value = inputs.get(name)
        for holder in (text, config):
            value = getattr(holder, name, None) if value is None else value
        found.append((name, value))
    return tuple(found)


def kind_of_output(output: Any) -> str:
    """Words for what a forward returned: the names of a mapping, the members of a tuple, or a class."""
    if isinstance(output, Mapping):
        return f"{type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__} of {', '.join(type(one).__name__ for one in output) or 'nothing'}"
    return type(output).__name__
