"""Tiny models and data that every trainer test shares."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BioGptConfig,
    BioGptForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.import_utils import is_peft_greater_or_equal


VOCAB = 99  # odd: shards of the head are uneven
SMALL: dict[str, Any] = {  # what the Llama-shaped configs have in common
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


def llama(tied: bool = False, layers: int = 4, **overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **sizes, **overrides}))


def gpt2(tied: bool = True, dropout_rate: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    dropout = {"resid_pdrop": dropout_rate, "embd_pdrop": dropout_rate, "attn_pdrop": dropout_rate}
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        attn_implementation="eager",
        tie_word_embeddings=tied,
        **dropout,
    )
    return GPT2LMHeadModel(config)


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, **sizes))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "num_hidden_layers": 4, "num_local_experts": 4}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **sizes, **router))


def mixtral_plain() -> MixtralForCausalLM:
    """Without the loss that balances experts."""
    model = mixtral()
    model.config.output_router_logits = False
    return model


def sliding() -> MistralForCausalLM:
    """A window of five tokens, shorter than the rows."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 3, "sliding_window": 5}
    return MistralForCausalLM(MistralConfig(**{**SMALL, "attn_implementation": "sdpa"}, **sizes))


def gemma3n() -> Gemma3nForCausalLM:
    """Six blocks, the last two of which read the key-value states of earlier ones."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 48, "num_hidden_layers": 6, "head_dim": 8, "num_kv_shared_layers": 2}
    per_layer = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    kinds = {
        "activation_sparsity_pattern": [0.0] * 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Gemma3nForCausalLM(Gemma3nTextConfig(**SMALL, **sizes, **per_layer, **kinds))


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    # A limit that Mamba's config does not have: planning counts the operations of a row of this length, one by one.
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, "max_position_embeddings": 64}
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, **sizes, pad_token_id=0))


def uneven(dropout_rate: float = 0.0) -> LlamaForCausalLM:
    """Three heads that share one key-value head: two ranks get two heads and one."""
    heads = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 45}
    options = {"num_hidden_layers": 2, "tie_word_embeddings": True, "attention_dropout": dropout_rate}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **heads}, **options))


def few_heads() -> LlamaForCausalLM:
    """Two heads that share one key-value head: fewer than four ranks."""
    return llama(layers=2, num_attention_heads=2, num_key_value_heads=1)


def biogpt_dropout() -> BioGptForCausalLM:
    """Dropout of probabilities and inside the MLP; the MLP's pairs belong to the blocks themselves."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "activation_dropout": 0.2}
    ends = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "eager"}
    return BioGptForCausalLM(BioGptConfig(**sizes, **rates, **ends, layerdrop=0.0))


def gpt_neox_dropout() -> GPTNeoXForCausalLM:
    """Attention and MLP side by side, each with dropout."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    rates = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "use_parallel_residual": True}
    ends = {"vocab_size": VOCAB, "max_position_embeddings": 64, "attn_implementation": "eager"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **rates, **ends))


def phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SMALL, intermediate_size=64, num_hidden_layers=2, pad_token_id=0))


def longrope() -> Phi3ForCausalLM:
    """Rotary embeddings that are others in rows of more than twelve tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    limit = {"original_max_position_embeddings": 12}
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**SMALL, **sizes, **limit, rope_parameters={**rope, **limit}))


def dynamic_rope() -> LlamaForCausalLM:
    """Rotary embeddings that change where rows grow past twelve tokens."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return llama(layers=2, max_position_embeddings=12, rope_parameters=rope)


def llama4() -> Llama4ForCausalLM:
    """The last block counts its tokens, and scales queries from token 12 on."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "intermediate_size_mlp": 64, "num_hidden_layers": 2, "head_dim": 8}
    scale = {"no_rope_layers": [1, 0], "floor_scale": 12, "attn_temperature_tuning": True}
    config = Llama4TextConfig(**SMALL, **sizes, **scale, num_local_experts=2, moe_layers=[], pad_token_id=0)
    return Llama4ForCausalLM(config)


def bloom() -> BloomForCausalLM:
    torch.manual_seed(0)
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, attn_implementation="eager")
    )


def trainable(model: Any) -> Any:
    """Without what has no gradient: a bias of keys shifts all scores of a query alike, and nothing crosses to an encoder."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(("k_proj.bias", "key.bias")) and ".encoder_attn" not in name)
    return model


def bart() -> BartForCausalLM:
    """Counts positions itself; its loss is a mean over labels that are not shifted."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    ends = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "eager"}
    half = {"is_decoder": True, "is_encoder_decoder": False, "dropout": 0.0}
    return trainable(BartForCausalLM(BartConfig(**sizes, **ends, **half)))


def roberta() -> RobertaForCausalLM:
    """Counts the tokens of a row that are no padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ends = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "eager"}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return trainable(RobertaForCausalLM(RobertaConfig(**sizes, **ends, **rates, is_decoder=True)))


def opt() -> OPTForCausalLM:
    """Counts positions by the mask."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    ends = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "eager"}
    return trainable(OPTForCausalLM(OPTConfig(**sizes, **ends, word_embed_proj_dim=32, dropout=0.0)))


def gpt_oss() -> GptOssForCausalLM:
    """Sinks, sliding and full attention, experts with halves interleaved and biases."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 8}
    router = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return GptOssForCausalLM(GptOssConfig(**SMALL, **sizes, **router, pad_token_id=0))


def deepseek_v3() -> DeepseekV3ForCausalLM:
    """Latent attention; a dense block, then one with shared and routed experts."""
    torch.manual_seed(0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    sizes = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    router = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, **latent, **sizes, **router, experts_implementation="eager"
    )
    return DeepseekV3ForCausalLM(config)


def qwen3_moe() -> Qwen3MoeForCausalLM:
    """Four blocks of five experts, which two ranks cannot share evenly; no auxiliary loss."""
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 16, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size": 32}
    router = {"num_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **sizes, **router))


def lora(model: Any, **options: Any) -> Any:
    """Adapters on a frozen model, all of them other than zero."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def biased(model: Any) -> Any:
    """Biases other than zero: what AdamW makes of the rounding error of a gradient is little beside them."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def llama_lora(dtype: torch.dtype = torch.float32) -> Any:
    """Adapters on all linear layers of a Llama."""
    return lora(llama().to(dtype))


def llama_native_lora() -> Any:
    """Adapters that transformers put on the model itself, without a wrapper."""
    from peft import LoraConfig

    model = llama()
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return model


# transformers 5.24 wants a PEFT above 0.21 for it.
HAS_ADD_ADAPTER = is_peft_greater_or_equal(MIN_PEFT_VERSION)
ADAPTED = {
    **({"llama_native_lora": llama_native_lora} if HAS_ADD_ADAPTER else {}),
    "gpt2_lora": lambda: lora(gpt2(), fan_in_fan_out=True),
    "mixtral_lora": lambda: lora(mixtral()),
    "mixtral_lora_experts": lambda: lora(
        mixtral(),
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "phi3_lora": lambda: lora(phi3(), target_modules=["qkv_proj", "gate_up_proj", "down_proj"], use_rslora=True),
    "llama_tied_lora": lambda: lora(llama(tied=True), target_modules=["q_proj", "v_proj", "embed_tokens"]),
    "llama_tied_lora_saved": lambda: lora(
        llama(tied=True), target_modules=["q_proj", "o_proj"], modules_to_save=["embed_tokens", "lm_head"]
    ),
    "llama_tied_lora_tokens": lambda: lora(
        llama(tied=True), target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2, 5, 40]}
    ),
    "llama_tied_lora_saved_tied": lambda: lora(
        llama(tied=True), target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "llama_lora_late": lambda: lora(llama(), target_modules=["q_proj", "up_proj"], layers_to_transform=[3]),
    "llama_lora_early": lambda: lora(llama(), target_modules=["o_proj"], layers_to_transform=[0, 1]),
    "llama_lora_head": lambda: lora(llama(), target_modules=["lm_head", "embed_tokens"]),
    "llama_dora": lambda: lora(llama(), use_dora=True),
    "llama_lora_bias": lambda: lora(llama(attention_bias=True), bias="lora_only"),
}


MODELS = {
    "llama": llama,
    "llama_lora": llama_lora,
    "llama_lora_half": lambda: llama_lora(torch.bfloat16),
    "llama_tied": lambda: llama(tied=True),
    "llama_1": lambda: llama(layers=1),
    "llama_deep": lambda: llama(tied=True, layers=16),  # some of its blocks show what all do
    "llama_half": lambda: llama().to(torch.bfloat16),
    "llama_8": lambda: llama(tied=True, layers=8),
    "llama_8_untied": lambda: llama(layers=8),
    "gpt2": gpt2,
    "gpt2_dropout": lambda: gpt2(dropout_rate=0.2),
    "qwen3": qwen3,
    "mixtral": mixtral,
    "mixtral_plain": mixtral_plain,
    "sliding": sliding,
    "gemma3n": gemma3n,
    "mamba": mamba,
    "uneven": uneven,
    "few_heads": few_heads,
    "uneven_dropout": lambda: uneven(dropout_rate=0.2),
    "biogpt_dropout": biogpt_dropout,
    "gpt_neox_dropout": gpt_neox_dropout,
    "phi3": phi3,
    "longrope": longrope,
    "dynamic_rope": dynamic_rope,
    "llama4": llama4,
    "bloom": bloom,
    "bart": bart,
    "roberta": roberta,
    "opt": opt,
    "gpt_oss": gpt_oss,
    "gpt_oss_biased": lambda: biased(gpt_oss()),
    "deepseek_v3": deepseek_v3,
    "qwen3_moe": qwen3_moe,
    **ADAPTED,
    "llama_lora_dropout": lambda: lora(llama(), lora_dropout=0.2),
    # Adapters of two layers that are two parameters in one memory, each other's transpose.
    "llama_tied_lora_tied": lambda: lora(
        llama(tied=True), target_modules=["q_proj", "embed_tokens", "lm_head"], ensure_weight_tying=True
    ),
    "llama_lora_biases": lambda: lora(biased(llama(attention_bias=True, mlp_bias=True)), bias="all", lora_bias=True),
    "gpt2_lora_biases": lambda: lora(biased(gpt2()), fan_in_fan_out=True, bias="all", lora_bias=True),
    "mixtral_plain_lora": lambda: lora(mixtral_plain()),
    "mixtral_plain_lora_attention": lambda: lora(
        mixtral_plain(), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    ),
    "mixtral_lora_attention": lambda: lora(mixtral(), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "uneven_lora": lambda: lora(uneven()),
    "deepseek_v3_lora": lambda: lora(
        deepseek_v3(),
        target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    ),
}


def rows(count: int, variable_length: bool = False) -> list[dict[str, list[int]]]:
    """Arithmetic progressions, learnable in a few steps; with -100 labels and uneven lengths on request."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        length = int(torch.randint(6, 17, (1,), generator=generator)) if variable_length else 16
        start, step = (int(torch.randint(1, bound, (1,), generator=generator)) for bound in (97, 4))
        ids = [(start + step * position) % 96 + 1 for position in range(length)]
        labels = [
            -100 if variable_length and (index * 7 + position) % 5 == 0 else token
            for position, token in enumerate(ids)
        ]
        made.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * length})
    return made


def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(feature["input_ids"]) for feature in features)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([f[name] + [value] * (longest - len(f[name])) for f in features])

    return {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", -100),
        "attention_mask": pad("attention_mask", 0),
    }


def moved(model: Any, size: float) -> Any:
    """`model`, near what it was: every parameter moved by numbers of `size`, the same in each process."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
    return model


def bytes_here(model: Any) -> int:
    """Of the parameters that this rank holds."""
    from hf_parallel.data_parallel.fsdp_parts import local_of

    return sum(local_of(parameter).nbytes for parameter in model.parameters())
