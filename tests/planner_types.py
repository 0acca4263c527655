"""Small models of the types that the planner is checked on."""

from __future__ import annotations

from typing import Any, Final

from transformers import PretrainedConfig
from transformers.models import auto as transformers_auto


LENGTH: Final = 64
TYPES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 128},
    "phi": {},
    "phi3": {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 128},
    "gpt_neo": {"attention_types": [[["global"], 3]], "num_layers": 3, "num_heads": 4},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4},
    "starcoder2": {},
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "nemotron": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}


def config_of_type(kind: str, **changed: object) -> PretrainedConfig:
    return transformers_auto.AutoConfig.for_model(kind, **{**SHAPE, **TYPES[kind], **changed})
