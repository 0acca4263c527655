"""Inputs of a model call that several stages, or shards, cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_parallel.compat.private_transformers import CACHES
from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


# Arguments that change what a model returns or keeps; a pipeline returns loss and logits only.
REFUSED = (*CACHES, "output_hidden_states", "output_attentions")


def refuse_inputs(batch: dict[str, Any], plan: PipelinePlan, pp_size: int, caches: bool) -> None:
    """Refuse what would need more of the model than a rank has; takes `return_dict` out of `batch`.

    Args:
        batch: Arguments of the call by name.
        plan: Plan of the stages, with the inputs that it was made with.
        pp_size: Number of pipeline ranks.
        caches: Whether the model keeps keys and values if it is not told whether to.

    Raises:
        UnsupportedError: Names the arguments.
    """
    given = [name for name in REFUSED if batch.get(name) not in (None, False)]
    embedded = batch.get("inputs_embeds")
    planned = any("inputs_embeds" in inputs for inputs in plan.inputs.covered)
    if isinstance(embedded, torch.Tensor) and (embedded.requires_grad or not planned):
        raise UnsupportedError(
            f"inputs_embeds in a batch with pp_size={pp_size}: the embedding is on the rank of the first "
            "stage only, so the other ranks can neither make these vectors nor train what made them. Give the model "
            "input_ids; what changes embeddings can be a forward hook of model.get_input_embeddings(), registered "
            "before training. Or set pp_size to 1."
        )
    if batch.pop("return_dict", True) is False:
        given.append("return_dict=False")
    if given:
        raise UnsupportedError(
            f"{', '.join(given)} with pp_size={pp_size}: a pipeline returns loss and logits only, and its stages keep no "
            "key-value cache (model.generate() works without). Save the model with trainer.save_model() and load it in one "
            "process for that, or use pp_size 1."
        )
    if torch.is_grad_enabled():
        _refuse_other_length(batch, pp_size)
    if batch.get("use_cache") is not None:
        caches = bool(batch["use_cache"])
    if caches and batch.get("position_ids") is not None and batch.get("attention_mask") is None:
        raise UnsupportedError(
            f"position_ids without attention_mask and with use_cache on (the config's default), with pp_size={pp_size}: models read "
            "positions that begin anew as packed sequences, which do not see each other, but only without a key-value cache. "
            "Stages keep no cache, so they would train other attention than one process. Pass use_cache=False to the model for "
            "sequences that stay apart, or an attention_mask of ones for sequences that see each other."
        )


def refuse_merged(layer: Any, pp_size: int) -> None:
    """Refuse to train layers of PEFT that run without their adapters: one process finds no gradient, a stage would go on.

    Args:
        layer: A layer with adapters, which are merged with those of all others; None without any.
        pp_size: Number of pipeline ranks.

    Raises:
        UnsupportedError: It is merged.
    """
    if layer is not None and layer.merged:
        raise UnsupportedError(
            f"a training forward with adapters that are merged into their layers (merge_adapter()), with pp_size={pp_size}: the layers "
            "run without them, so they get no gradient. Call model.unmerge_adapter() first."
        )


def _refuse_other_length(batch: Mapping[str, Any], pp_size: int) -> None:
    """Refuse a mask of other tokens than a call has: stages are planned with masks of these, and one fails where others wait."""
    mask, tokens = batch.get("attention_mask"), batch.get("input_ids")
    if not (isinstance(mask, torch.Tensor) and isinstance(tokens, torch.Tensor) and mask.ndim == tokens.ndim == 2):
        return
    if mask.shape[1] != tokens.shape[1]:
        raise UnsupportedError(
            f"attention_mask of {mask.shape[1]} tokens for input_ids of {tokens.shape[1]} in a training forward with pp_size={pp_size}: "
            "stages keep no cache of keys and values, so the mask is that of the tokens of the call. Cut or pad it to their "
            "length, or set pp_size to 1."
        )


def refuse_attentions(model: Any, given: Mapping[str, Any], tp_size: int) -> None:
    """Refuse to give attentions where each rank computes its own heads.

    Args:
        model: With a config.
        given: Arguments of the call by name.
        tp_size: Ranks that share the heads.

    Raises:
        UnsupportedError: The call, or the config, asks for them.
    """
    asked = given.get("output_attentions")
    if tp_size > 1 and (
        getattr(getattr(model, "config", None), "output_attentions", False) if asked is None else asked
    ):
        raise UnsupportedError(
            f"output_attentions with tp_size={tp_size}: each rank computes its own heads, so the attentions that it has are a part of "
            "those of one process. Leave it out (model.config.output_attentions = False), or set tp_size to 1."
        )


def unserved_outputs(model: Any) -> list[str]:
    """Outputs that a model's config asks for beside loss and logits, and that a pipeline does not give."""
    config: Any = getattr(model, "config", None)
    asked = {
        "hidden_states": "output_hidden_states",
        "attentions": "output_attentions",
        "router_logits": "output_router_logits",
    }
    return [name for name, key in asked.items() if getattr(config, key, False)]


def keeps_cache(model: Any) -> bool:
    """Whether a model keeps keys and values where a call does not say so."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return any(getattr(one, "use_cache", False) for one in (config, text))
