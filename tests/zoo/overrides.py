"""What the shrinking rules get wrong, by type: the only per-architecture knowledge of the zoo.

Keys with a dot reach sub-configurations; `blocks` sets the depth; `default` holds what the class cannot be made
without; `DROP` leaves a field to the configuration's own code.
"""

from __future__ import annotations

from typing import Any

from zoo.shrink import BLOCKS, HIDDEN, VOCAB


class _Drop:
    """Marks a field that is to be computed by the configuration itself."""


DROP = _Drop()
Settings = dict[str, Any]
SLIDING_FULL = ["sliding_attention", "full_attention"]
ENCODERS = [
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
]
_HYBRID = ["hybrid", "linear_attention", "hybrid", "linear_attention", "hybrid"]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_INDEXER: Settings = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
    "hc_count": 2,
}
_SHARED_KV: Settings = {"blocks": 6, "num_kv_shared_layers": 2, "layer_types": SLIDING_FULL * 3}
_SLIDING_MLA: Settings = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
    "per_layer_config": DROP,
}
_DRAFT_HEAD: Settings = {
    "default": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "backbone_hidden_size": HIDDEN,
    "text_config.hidden_size_per_layer_input": 0,
    "text_config.vocab_size_per_layer_input": 0,
    "text_config.num_kv_shared_layers": BLOCKS,
    "text_config.layer_types": [*SLIDING_FULL * 2, "full_attention"],
}

OVERRIDES: dict[str, Settings] = {
    "axk1": {"head_dim": 8},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3],
        "encoder_config.hidden_size_global": HIDDEN,
        "decoder_config.hidden_size_global": HIDDEN,
        "encoder_config.num_hidden_layers": 1,
        "cross_attn_k": 1,
        "encoder_config.cross_attn_k": 1,
        "decoder_config.cross_attn_k": 1,
        "patch_in_forward": False,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _MROPE, "sliding_attention": _MROPE}},
    "cpmant": {"prompt_length": 4, "segment_types": 4, "prompt_types": 4},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.kv_n_heads": 2, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"n_group": None, "topk_group": None, "topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        **{f"text_config.{name}": value for name, value in _SLIDING_MLA.items()},
        "vision_config.pyramid_num_routed": [-1, *[4] * (BLOCKS - 1)],
        "vision_config.adapter_out_dim": HIDDEN,
        "vision_config.adapter_in_dim": HIDDEN,
        "audio_config.adapter_out_dim": HIDDEN,
        "audio_config.adapter_input_size": HIDDEN,
    },
    "dots3_note_text": _SLIDING_MLA,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {**_SHARED_KV, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.5, *[0.0] * 5]},
    "gemma4_assistant": _DRAFT_HEAD,
    "gemma4_unified_assistant": _DRAFT_HEAD,
    "gpt_neo": {"attention_types": [[["global", "local"], 2], [["global"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": [2] * BLOCKS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2 + ["conv"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh", "local", "lsh", "local"],
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "hash_seed": 0,
        "num_buckets": 4,
        "vocab_size": VOCAB,
    },
    "rembert": {"output_embedding_size": HIDDEN, "input_embedding_size": 32},
    "roc_bert": {
        "shape_vocab_size": VOCAB,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": VOCAB,
        "pronunciation_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": {"head_dim": 8},
    "zamba": {"layers_block_type": _HYBRID, "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 32},
    "zamba2": {
        "layers_block_type": _HYBRID,
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "attention_hidden_size": DROP,
        "attention_head_dim": DROP,
        "kv_channels": DROP,
    },
    "zaya": {"num_experts_per_tok": 1},
}
for _name in ENCODERS:  # causal only when told so
    OVERRIDES[_name] = {"is_decoder": True, **OVERRIDES.get(_name, {})}

# A second, differently shaped configuration of a type: "type@variant" -> settings on top of the type's.
VARIANTS: dict[str, Settings] = {
    "bloom@postres": {"apply_residual_connection_post_layernorm": True},
    "falcon@alibi": {"alibi": True},
    # keys and values of early layers are reused by the last two, through a dict handed to every layer
    "gemma4_text@kv": _SHARED_KV,
    "gemma4_unified_text@kv": _SHARED_KV,
    "gemma4_text@moe": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    # integer top-k positions of one layer are reused by the next
    "glm_moe_dsa@shared": {"indexer_types": ["full", "shared", "full", "shared", "shared"]},
    "gpt2@untied": {"tie_word_embeddings": False},
    "granite@tied": {"tie_word_embeddings": True},
    "llama@tied": {"tie_word_embeddings": True},
    # with states to attend to, the cross-attention blocks run
    "mllama@cross": {},
    "opt@post": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "qwen4_exp_text@ple": {
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "split_ngram_parts": 4,
        "eos_token_id": 2,
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
    },
    # in evaluation the weights of every second block are rescaled
    "rwkv@rescale": {"rescale_every": 2},
    # two shared transformer blocks take turns
    "zamba2@2blocks": {"num_mem_blocks": 2, "layers_block_type": ["hybrid"] * BLOCKS},
}
# The class of these types takes a part of the type's configuration, which `from_config` does not hand over.
PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}
# Types whose sequence length must be a multiple of something.
LENGTH_MULTIPLE = {"reformer": 4}
