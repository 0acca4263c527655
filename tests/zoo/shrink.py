"""Tiny settings for a configuration class that nobody described: by field name, from its own defaults.

A field is touched only where the default configuration has it, with a number. Fields are known by name; what the rules
get wrong for a type is corrected in `overrides.py`.
"""

from __future__ import annotations

from typing import Any


VOCAB = 101  # odd and prime: nothing divides it
BLOCKS = 5  # no multiple of 2, 3 or 4 stages
HIDDEN = 64

# No value twice: a later entry would replace an earlier one.
_BY_VALUE: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size ngram_vocab_size_base",
    HIDDEN: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim embedding_dim lru_width "
    "attention_hidden_size out_hidden_size",
    96: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim d_inner ffn_hidden_size dff dim_ff d_ff "
    "intermediate_size_mlp dense_intermediate_size feed_forward_size",
    72: "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length max_source_positions "
    "max_target_positions original_max_position_embeddings",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank image_size",
    16: "head_dim kv_channels dim_head attention_head_dim kv_lora_rank v_head_dim qk_head_dim o_lora_rank "
    "index_head_dim mamba_d_head mamba_headdim mamba_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim num_position_embeddings num_mel_bins",
    8: "hidden_size_per_layer_input laurel_rank gated_norm_rank adapter_rank rotary_dim qk_rope_head_dim "
    "qk_nope_head_dim index_topk mamba_d_state mamba_n_heads mamba_chunk_size mamba_num_heads state_size "
    "ssm_state_size time_step_rank chunk_size mamba_dt_rank sliding_window sliding_window_size "
    "attention_window_size window_size attention_chunk_size patch_size",
    BLOCKS: "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers num_decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts mamba_d_conv conv_kernel linear_num_value_heads linear_num_heads "
    "conf_num_attention_heads",
    2: "num_key_value_heads num_kv_heads index_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "moe_top_k zero_expert_num mamba_expand n_mamba_heads linear_num_key_heads depth num_global_layers "
    "encoder_layers num_encoder_layers conf_num_hidden_layers",
    1: "n_group topk_group num_expert_group n_groups n_shared_experts num_shared_experts first_k_dense_replace "
    "num_dense_layers mamba_n_groups mamba_ngroups num_lstm_layers",
    0: "num_nextn_predict_layers attention_dropout dropout hidden_dropout_prob attention_probs_dropout_prob "
    "activation_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout decoder_layerdrop encoder_layerdrop layerdrop "
    "router_jitter_noise input_jitter_noise emb_pdrop classifier_dropout resid_dropout embed_dropout "
    "embedding_dropout dropout_p dropout_rate mlp_dropout residual_dropout classifier_dropout_prob "
    "lsh_attention_probs_dropout_prob local_attention_probs_dropout_prob projector_dropout summary_first_dropout "
    "summary_last_dropout",
}
SIZES = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
# 0 in a default configuration means "this type has none".
STAY_ZERO = frozenset(
    [
        "n_shared_experts",
        "num_shared_experts",
        "first_k_dense_replace",
        "zero_expert_num",
        "num_dense_layers",
        "rotary_dim",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "n_group",
        "topk_group",
        "n_groups",
    ]
)
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
# One kind of layer per block: cut to a cycle through the kinds that the default uses.
PATTERNS = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1} | dict.fromkeys(
    [
        "eos_token_id",
        "sep_token_id",
        "cls_token_id",
        "unk_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "forced_eos_token_id",
        "forced_bos_token_id",
        "eod_token_id",
    ],
    2,
)
# Placeholders of images and sound: at the end of the vocabulary, where no batch draws from.
PLACEHOLDERS = [
    "image_token_id",
    "video_token_id",
    "audio_token_id",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "boa_token_id",
    "eoa_token_id",
    "boi_token_index",
    "eoi_token_index",
    "eoa_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
]
LAST_PLAIN_TOKEN = VOCAB - 1 - len(PLACEHOLDERS)  # batches draw from [FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN]
FIRST_PLAIN_TOKEN = 8
# Weights of auxiliary losses: large, so that a lost router logit shows in the gradients.
AUXILIARY = ["router_aux_loss_coef", "aux_loss_alpha", "moe_aux_loss_coeff", "router_z_loss_coef", "aux_loss_coef"]
AUXILIARY_WEIGHT = 0.5
SKIPPED = ("id2label", "label2id", "transformers_version", "architectures")


def shrink(config: Any, blocks: int = BLOCKS) -> dict[str, Any]:
    """Keyword arguments that make a tiny configuration of the class of `config`; sub-configurations become dicts.

    Args:
        config: A default configuration.
        blocks: Layers of its decoder.
    """
    values = {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in SKIPPED}
    renamed = getattr(type(config), "attribute_map", None) or {}
    made: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            made[name] = {**shrink(value, blocks), "model_type": value.model_type}
        elif name not in renamed:
            made |= _field(name, value, values, blocks)
    return made


def _field(name: str, value: Any, values: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The tiny value of one field, or nothing where no rule knows it."""
    if name == "use_cache":
        return {name: False}
    if name == "output_router_logits":
        return {name: True}
    if name in PATTERNS:
        return {name: _cycle(value, blocks)} if isinstance(value, (list, tuple)) and value else {}
    if name in SPECIAL_TOKENS:
        return _special(name, value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return {}
    if name in PLACEHOLDERS:
        return {name: VOCAB - 1 - PLACEHOLDERS.index(name)}
    if name in AUXILIARY:
        return {name: AUXILIARY_WEIGHT}
    if name in SIZES:
        return {name: _size(name, value, values, blocks)}
    return {}


def _cycle(kinds: Any, blocks: int) -> list[Any]:
    distinct = list(dict.fromkeys(kinds))
    return [distinct[j % len(distinct)] for j in range(blocks)]


def _special(name: str, value: Any) -> dict[str, Any]:
    """Ids that would fall outside the vocabulary move to its start."""
    if isinstance(value, (list, tuple)):
        return {name: [SPECIAL_TOKENS[name]]}
    if isinstance(value, int) and not 0 <= value < FIRST_PLAIN_TOKEN:
        return {name: SPECIAL_TOKENS[name]}
    return {}


def _size(name: str, value: float, values: dict[str, Any], blocks: int) -> float:
    if value == 0 and name in STAY_ZERO:
        return 0
    if name in KEY_VALUE_HEADS and value in (1, values.get("num_attention_heads")):
        return 1 if value == 1 else SIZES["num_attention_heads"]  # multi-query or multi-head, as the type is
    size = blocks if SIZES[name] == BLOCKS else SIZES[name]
    return float(size) if isinstance(value, float) else size
