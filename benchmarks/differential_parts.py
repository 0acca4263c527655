"""What users write around a Trainer: losses, callbacks, subclasses, optimizers, data. Parts of the scripts that `make
differential` draws.

The source of each part is copied into a script as it is, with the parts that it names in `NEEDS`; nothing here may use a
helper of the repository. Models are data: a type and its tiny settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BatchEncoding, Trainer


VOCAB = 97
HEADER = """import functools
import os
import re
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BatchEncoding, CONFIG_MAPPING, Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback, HFParallelPlugin
"""

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 64}
_SMALL = {"vocab_size": VOCAB, **_SIZES, **_HEADS, "initializer_range": 0.15}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    **_QUIET,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_WIDE = {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_SMALL, "tie_word_embeddings": False}),
    "llama_tied": ("llama", {**_SMALL, "tie_word_embeddings": True}),
    "llama_biases": ("llama", {**_SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {**_GPT2, "initializer_range": 0.15}),
    "gpt2_untied": ("gpt2", {**_GPT2, "initializer_range": 0.15, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {**_SMALL, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**_SMALL, "use_sliding_window": False, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {**_SMALL, **_MIXTURE, "experts_implementation": "eager"}),
    "gemma2": ("gemma2", {**_SMALL, **_ENDS, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "gemma3_text": (
        "gemma3_text",
        {**_SMALL, **_ENDS, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    ),
    "phi3": ("phi3", {**_SMALL, **_ENDS, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi": ("phi", {**_WIDE, **_ENDS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "partial_rotary_factor": 0.5}),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 4, "n_head": 4, "initializer_range": 0.15}),
    "opt": (
        "opt",
        {**_WIDE, **_ENDS, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.15},
    ),
    "gpt_neox": ("gpt_neox", {**_WIDE, "use_parallel_residual": True}),
    "falcon": ("falcon", {**_WIDE, "multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "olmo2": ("olmo2", {**_SMALL, **_ENDS}),
    "cohere": ("cohere", {**_SMALL, **_ENDS, "logit_scale": 0.5}),
    "stablelm": ("stablelm", {**_SMALL, **_ENDS}),
    "mamba": ("mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, **_ENDS}),
    "gpt_oss": (
        "gpt_oss",
        {**_SMALL, **_MIXTURE, **_ENDS, "head_dim": 8, "sliding_window": 8, "experts_implementation": "eager"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **{**_SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
            **_LATENT,
            **_ROUTED,
            "experts_implementation": "eager",
        },
    ),
}


def make_model(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


# -- data ------------------------------------------------------------------------------------------------------------


def make_rows(count: int, seed: int, variable: bool = False, ignored: str = "", kind: str = "right") -> list[Any]:
    """Rows of random tokens. `ignored`: tokens, whole rows, or the prompt (all but a tail of its own length)."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = int(torch.randint(4, 15, (1,), generator=generator)) if variable and kind != "packed" else 14
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        labels = list(ids)
        if ignored == "tokens":
            labels = [-100 if (index * 7 + place) % 5 == 0 else token for place, token in enumerate(ids)]
        elif ignored == "rows" and index % 3 == 1:
            labels = [-100] * length
        elif ignored == "prompt":
            labels = [-100] * (length - 1 - index % 3) + ids[length - 1 - index % 3 :]
        row = {"input_ids": ids, "labels": labels, "attention_mask": [1] * length, "weight": 0.5 + index % 4}
        if kind == "packed":
            cut = 4 + index % 6
            row["position_ids"] = [*range(cut), *range(length - cut)]
        made.append(row)
    return made


class Collator:
    """Pads right to the longest row, left to 16, or not at all; packed rows have positions and no mask."""

    def __init__(self, kind: str, weights: bool = False) -> None:
        self.kind, self.weights = kind, weights

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        size = 16 if self.kind == "left" else max(len(row["input_ids"]) for row in rows)

        def pad(name: str, value: int) -> torch.Tensor:
            found = []
            for row in rows:
                fill = [value] * (size - len(row[name]))
                found.append(fill + row[name] if self.kind == "left" else row[name] + fill)
            return torch.tensor(found)

        batch = {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}
        if self.kind == "packed":
            batch["position_ids"] = pad("position_ids", 0)
        elif self.kind != "bare":
            batch["attention_mask"] = pad("attention_mask", 0)
            if self.kind == "left":
                batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        if self.weights:
            batch["weight"] = torch.tensor([row["weight"] for row in rows])
        return batch


class Encoding:
    """A collator that gives what a tokenizer's `pad` gives, not a dict."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, rows: list[Any]) -> Any:
        return BatchEncoding(self.inner(rows))


class WholeMask:
    """A collator that gives the whole mask, (B, 1, S, S)."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = self.inner(rows)
        kept = batch["attention_mask"].bool()
        size = kept.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool).tril()[None] & kept[:, None, :] | torch.eye(
            size, dtype=torch.bool
        )
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, -1e9)[:, None]
        return batch


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def accuracy(prediction: Any) -> dict[str, float]:
    found = torch.as_tensor(prediction.predictions)
    found = (found if found.ndim == 2 else found.argmax(-1))[:, :-1]
    labels = torch.as_tensor(prediction.label_ids)[:, 1:]
    return {"accuracy": float(((found == labels) & (labels != -100)).sum()), "rows": float(len(labels))}


def guesses(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def freeze(model: Any, what: str) -> None:
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    if what == "embedding":
        model.get_input_embeddings().requires_grad_(False)
    elif what == "head":
        model.get_output_embeddings().requires_grad_(False)
    elif what == "first":
        blocks[: len(blocks) // 2].requires_grad_(False)
        model.get_input_embeddings().requires_grad_(False)
    elif what == "last":
        blocks[len(blocks) // 2 :].requires_grad_(False)
    elif what == "vectors":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
    elif what == "matrices":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.ndim == 1 or "embed" in name or "wte" in name)


# -- losses ----------------------------------------------------------------------------------------------------------


def token_losses(logits: Any, labels: Any) -> Any:
    """Loss of every token, 0 where ignored; and which tokens count."""
    targets = labels[:, 1:]
    flat = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view(targets.shape), targets != -100


def loss_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return token_losses(outputs["logits"], labels)[0].sum() / num_items_in_batch


def loss_token_weights(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses, _ = token_losses(outputs["logits"], labels)
    return (losses * (1.0 + 3.0 * (labels[:, 1:] % 7 == 0))).sum() / num_items_in_batch


def loss_focal(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses, _ = token_losses(outputs["logits"], labels)
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / num_items_in_batch


def loss_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses, kept = token_losses(outputs["logits"], labels)
    return losses.sum() / kept.sum().clamp(min=1)


def loss_row_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses, kept = token_losses(outputs["logits"], labels)
    return (losses.sum(-1) / kept.sum(-1).clamp(min=1)).mean()


def loss_softmax_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses, kept = token_losses(outputs["logits"], labels)
    rows = losses.sum(-1) / kept.sum(-1).clamp(min=1)
    return (torch.softmax(rows.detach(), 0) * rows).sum()


def loss_pairs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """As in DPO: the first half of the rows against the second."""
    losses, _ = token_losses(outputs["logits"], labels)
    rows = losses.sum(-1)
    half = max(1, len(rows) // 2)
    return -F.logsigmoid(0.1 * (rows[-half:] - rows[:half])).mean()


def patched_token_weights(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any
) -> Any:
    losses, kept = token_losses(logits, labels)
    weighted = losses * (1.0 + 9.0 * (labels[:, 1:] == 5))
    return weighted.sum() / (kept.sum() if num_items_in_batch is None else num_items_in_batch)


def patched_row_mean(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
    losses, kept = token_losses(logits, labels)
    return (losses.sum(-1) / kept.sum(-1).clamp(min=1)).mean()


def patched_z_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
    losses, kept = token_losses(logits, labels)
    square = torch.logsumexp(logits[:, :-1].float(), -1) ** 2 * kept
    return (losses + 1e-2 * square).sum() / (kept.sum() if num_items_in_batch is None else num_items_in_batch)


# -- Trainers --------------------------------------------------------------------------------------------------------


class LossOnLogits(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, kept = token_losses(outputs.logits, labels)
        loss = losses.sum() / kept.sum().clamp(min=1)
        return (loss, outputs) if return_outputs else loss


class ScaledLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        return (found[0] * 0.3, found[1]) if return_outputs else found * 0.3


class RowWeights(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels, weight = inputs.pop("labels"), inputs.pop("weight")
        outputs = model(**inputs)
        losses, kept = token_losses(outputs.logits, labels)
        loss = (losses.sum(-1) / kept.sum(-1).clamp(min=1) * weight).mean()
        return (loss, outputs) if return_outputs else loss


class LossAndEntropy(Trainer):
    """The model's own loss and a term of its logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        entropy = torch.distributions.Categorical(logits=outputs.logits.float()).entropy().mean()
        loss = outputs.loss - 0.1 * entropy
        return (loss, outputs) if return_outputs else loss


class Temperature(Trainer):
    """A parameter that only the loss reads."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, kept = token_losses(outputs.logits * self.model.temperature, labels)
        loss = losses.sum() / kept.sum().clamp(min=1)
        return (loss, outputs) if return_outputs else loss


class Regularised(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        squares = 1e-2 * sum((p.float() ** 2).sum() for p in model.parameters() if p.requires_grad)
        return (found[0] + squares, found[1]) if return_outputs else found + squares


class Embedded(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        ids = inputs.pop("input_ids")
        inputs["inputs_embeds"] = model.get_input_embeddings()(ids) * 1.1
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class TwoForwards(Trainer):
    """A consistency loss: the batch as it is, and once more with other labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        other = model(**{**inputs, "labels": inputs["labels"].roll(1, -1)})
        loss = outputs.loss + 0.1 * other.loss
        return (loss, outputs) if return_outputs else loss


class EditedLabels(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        labels[labels % 3 == 0] = -100
        return super().training_step(model, inputs, *args, **kwargs)


class NewInputs(Trainer):
    """Word dropout on the ids, which the labels keep."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        inputs["input_ids"] = torch.where(ids % 5 == 0, torch.full_like(ids, 3), ids)
        return super().training_step(model, inputs, *args, **kwargs)
