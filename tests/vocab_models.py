"""Tiny models whose embedding, head or loss differ: ties, caps, scales, biases, projections; odd vocabularies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tp_models import spread
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
)


VOCAB = 101  # odd and prime: every split is uneven
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 32,
}


def config_of(case: str) -> PretrainedConfig:
    off = {"attention_dropout": 0.0}
    made: dict[str, PretrainedConfig] = {
        "llama": LlamaConfig(**WIDE, tie_word_embeddings=False),
        "llama_tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
        "gpt2": GPT2Config(**COMMON, n_embd=48, n_layer=2, n_head=6, n_positions=32, **NO_DROPOUT),
        "gemma2": Gemma2Config(**WIDE, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8, **off),
        "cohere": CohereConfig(**WIDE, logit_scale=0.25, **off),
        "granite": GraniteConfig(**WIDE, logits_scaling=3.0, embedding_multiplier=2.0, tie_word_embeddings=True),
        "opt": OPTConfig(
            **COMMON,
            hidden_size=48,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=6,
            word_embed_proj_dim=24,
            max_position_embeddings=32,
            dropout=0.0,
            **off,
        ),
        "bloom": BloomConfig(**COMMON, hidden_size=48, n_layer=2, n_head=6, hidden_dropout=0.0, **off),
        "phi": PhiConfig(**WIDE, tie_word_embeddings=False, **off),
        "phi_tied": PhiConfig(
            **WIDE, tie_word_embeddings=True, **off
        ),  # the first stage has the head's weight, not its bias
    }
    return made[case]


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES = ["llama", "llama_tied", "gpt2", "gemma2", "cohere", "granite", "opt", "bloom", "phi", "phi_tied"]


def vocab_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights on every rank and in every call; training mode, no dropout anywhere."""
    model = AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager")
    spread(model)
    return model.to(dtype).train()


def vocab_batch(seed: int = 3, rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Tokens of the whole vocabulary, right-padded; labels -100 on the padding and on one more."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    ids[1, 2] = VOCAB - 1
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
