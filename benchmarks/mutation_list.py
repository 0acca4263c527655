"""The bugs of `mutations.py`, each with the layout in which it is tried and the place that `verify` has to name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
}
LLAMA = LlamaConfig(**SIZES, num_hidden_layers=4, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=4)
GPT2 = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=101, n_positions=64, bos_token_id=0, eos_token_id=0)
GEMMA2 = Gemma2Config(**SIZES, num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=8, sliding_window=8)
OPT = OPTConfig(
    hidden_size=64,
    ffn_dim=96,
    num_attention_heads=4,
    num_hidden_layers=4,
    vocab_size=101,
    max_position_embeddings=64,
    word_embed_proj_dim=64,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=2,
)
BLOOM = BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=101, bos_token_id=1, eos_token_id=2)
MODELS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "gemma2": GEMMA2, "opt": OPT, "bloom": BLOOM}
# Blocks, key-value heads, vocabulary and rows that no number of ranks divides.
ODD = LlamaConfig(
    hidden_size=48,
    intermediate_size=77,
    num_attention_heads=6,
    num_key_value_heads=1,
    num_hidden_layers=3,
    vocab_size=103,
    tie_word_embeddings=False,
)
BALANCED = MixtralConfig(
    **SIZES, num_hidden_layers=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1
)
AUXILIARY = "mixtral with an auxiliary loss"
ALL_MODELS = {**MODELS, "odd llama": ODD, AUXILIARY: BALANCED}
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}
DP2: dict[str, Any] = {}
ZERO1 = {"zero": {"stage": 1}}
ZERO2 = {"zero": {"stage": 2}}
ZERO3 = {"zero": {"stage": 3}}
SP2 = {"sp_size": 2}
EP2 = {"ep_size": 2}
MORE = "mutation_bugs_more"
FORWARD, INPUT, WEIGHT, REDUCTION, CLIPPING, OPTIMIZER = (
    "forward",
    "input gradient",
    "weight gradient",
    "reduction",
    "clipping",
    "optimizer",
)


@dataclass(frozen=True)
class Bug:
    """A bug, and where it is tried.

    Args:
        kind: What it is, for the table.
        name: Function of `home`.
        settings: The layout.
        module: What the name of the module that `verify` names contains; empty: it is in no module, and none is named; `*`: any.
        parts: The directions that are right.
        model: Of `MODELS`.
        more: Arguments of `verify`.
        home: Module with the function.
    """

    kind: str
    name: str
    settings: dict[str, Any]
    module: str
    parts: tuple[str, ...]
    model: str = "llama"
    more: dict[str, Any] | None = None
    home: str = "mutation_bugs"

    @property
    def key(self) -> str:
        """In the report."""
        return " ".join([self.name, name_of(self.settings), *((self.more or {}).get("dtype", "").split())])

    def is_placed(self, place: dict[str, Any]) -> bool:
        """Whether what `verify` named is where the bug is."""
        named = place["module"]
        right = bool(named) if self.module == "*" else self.module in named if self.module else not named
        return right and place["kind"] in self.parts


BUGS = (
    Bug("all-reduce of a row left out", "forward_sum_missing", TP2, "layers.0.self_attn", (FORWARD,)),
    Bug("all-reduce of a row done twice", "forward_sum_doubled", TP2, "layers.0.self_attn", (FORWARD,)),
    Bug("all-reduce of an embedding left out", "embedding_sum_missing", TP2, "embed_tokens", (FORWARD,)),
    Bug("gradient of a column's input not summed", "input_gradient_not_summed", TP2, "lm_head", (INPUT,)),
    Bug("gradients summed over replicas, not averaged", "gradient_sum_instead_of_mean", DP2, "", (REDUCTION,)),
    Bug(
        "gradient not summed over holders of a tied matrix",
        "tied_gradient_not_summed",
        PP2,
        "embed_tokens",
        (REDUCTION,),
    ),
    Bug("norm counts a gradient twice", "norm_counts_twice", PP2, "", (CLIPPING,)),
    Bug("mean of the microbatches' means", "mean_of_means", PP2, "loss", (INPUT,)),
    Bug(
        "recomputation from other values",
        "stale_recomputation",
        {**PP2, "activation_checkpointing": {"every": 1}},
        "layers.2",
        (INPUT,),
    ),
    Bug("wrong loss scale", "loss_scale_wrong", PP2, "loss", (INPUT,)),
    Bug("a microbatch dropped", "microbatch_dropped", PP2, "loss", (INPUT,)),
    Bug("order of shards swapped", "shards_swapped", TP2, "layers.1.mlp.down_proj", (FORWARD,)),
    Bug("bias added on every rank", "bias_on_every_rank", TP2, "h.1.mlp", (FORWARD,), "gpt2"),
    Bug("key-value heads of another rank", "kv_heads_mixed", TP2, "layers.1.self_attn", (FORWARD,)),
    Bug("wrong positions in a stage", "positions_wrong", PP2, "layers.2.self_attn", (FORWARD,)),
    Bug("gradient of a router lost", "router_gradient_lost", PP2, "gate", (WEIGHT,), "mixtral"),
    Bug("clipping before the reduction", "clipped_before_the_reduction", DP2, "", (REDUCTION,)),
    Bug("gradients through bf16 and back", "gradients_rounded_to_bf16", DP2, "*", (REDUCTION,)),
    Bug("hidden states through bf16 and back", "hidden_states_rounded_to_bf16", PP2, "layers.2", (FORWARD,)),
    Bug("gradient between stages scaled", "gradient_between_stages_scaled", PP2, "layers.2", (INPUT,)),
    Bug("a part of the optimizer is stale", "optimizer_shard_stale", ZERO1, "*", (OPTIMIZER,)),
    Bug("a replica with another learning rate", "replica_not_updated", DP2, "*", (OPTIMIZER,)),
    Bug("attention mask dropped in a stage", "mask_dropped", PP2, "layers.2.self_attn", (FORWARD,)),
    Bug("labels shifted twice", "labels_shifted_twice", PP2, "loss", (INPUT,)),
    Bug("weight decay on norms and biases", "decay_on_norms", PP2, "norm", (OPTIMIZER,)),
    Bug("a buffer with other values in a stage", "buffer_of_another_mode", PP2, "rotary_emb", (FORWARD,)),
    Bug("off by one in accumulation", "first_batch_lost", DP2, "*", (REDUCTION,), more={"accumulation": 2}),
    Bug("rotary base of one shard", "rotary_base_of_one_shard", TP2, "rotary_emb", (FORWARD,)),
    Bug(
        "weight gradient of a microbatch lost",
        "weight_gradient_of_a_microbatch_lost",
        PP2,
        "layers.2.mlp.down_proj",
        (WEIGHT,),
    ),
    Bug("gradient of a tied matrix doubled", "tied_gradient_doubled", TP2, "embed_tokens", (WEIGHT,)),
    Bug("epsilon of a norm", "norm_epsilon_of_a_stage", PP2, "layers.2.input_layernorm", (FORWARD,)),
    Bug("each stage clips by its own norm", "clipped_by_each_stage", PP2, "", (CLIPPING,)),
    Bug("beta of one replica's optimizer", "beta_of_one_rank", DP2, "*", (OPTIMIZER,)),
    Bug("beta of one stage's optimizer", "beta_of_one_rank", PP2, "*", (OPTIMIZER,)),
    Bug("weights of the last step", "stale_weights_at_a_boundary", PP2, "layers.2.mlp.down_proj", (FORWARD,)),
    Bug("loss divided by all tokens", "loss_divided_by_all_tokens", PP2, "loss", (INPUT,)),
    Bug(
        "key heads of another rank, backward only",
        "kv_heads_mixed_in_backward",
        TP2,
        "layers.1.self_attn",
        (INPUT,),
    ),
    Bug("rows in another order than their labels", "replica_with_rows_of_another", DP2, "embed_tokens", (FORWARD,)),
    Bug("gradient of the last step kept", "gradients_kept_on_a_stage", PP2, "layers.2.mlp.down_proj", (WEIGHT,)),
    Bug("copy of a tied matrix not updated", "tied_copy_not_updated", PP2, "embed_tokens", (OPTIMIZER,)),
    Bug(
        "a parameter left out of the reduction",
        "parameter_left_out_of_the_reduction",
        DP2,
        "layers.2.self_attn.q_proj",
        (REDUCTION,),
    ),
    Bug(
        "gradient of a norm halved on a shard, activations sharded too",
        "norm_gradient_of_one_shard",
        {**TP2, "tensor_parallel": {"sequence_parallel": True}},
        "layers.1.input_layernorm",
        (WEIGHT,),
    ),
    Bug("all-reduce of a row in bf16", "forward_sum_in_bf16", TP2, "layers.0.self_attn", (FORWARD,)),
    Bug("learning rate scheduler of a replica stepped twice", "scheduler_stepped_twice", DP2, "*", (OPTIMIZER,)),
    Bug("a weight of a replica differs", "one_weight_differs", DP2, "layers.1.mlp.up_proj", (FORWARD,)),
    Bug(
        "the last microbatch's gradient divided twice",
        "last_microbatch_divided_twice",
        PP2,
        "loss",
        (INPUT,),
        home=MORE,
    ),
    Bug(
        "GELU of another kind, backward only",
        "gelu_of_another_kind_in_backward",
        PP2,
        "h.2.mlp",
        (INPUT,),
        "gpt2",
        home=MORE,
    ),
    Bug(
        "padding in the loss of a microbatch", "padding_in_the_loss_of_a_microbatch", PP2, "loss", (INPUT,), home=MORE
    ),
    Bug(
        "mask of the first microbatch for all",
        "mask_of_the_first_microbatch",
        PP2,
        "layers.2.self_attn",
        (FORWARD,),
        home=MORE,
    ),
    Bug(
        "learning rate scheduler of a stage stepped twice",
        "scheduler_stepped_twice",
        PP2,
        "embed_tokens",
        (OPTIMIZER,),
    ),
    Bug("epsilon of one replica's optimizer", "epsilon_of_one_rank", DP2, "*", (OPTIMIZER,), home=MORE),
    Bug("epsilon of one stage's optimizer", "epsilon_of_one_rank", PP2, "*", (OPTIMIZER,), home=MORE),
    Bug("weight decay on norms of one replica", "decay_on_norms_of_one_rank", DP2, "norm", (OPTIMIZER,), home=MORE),
    Bug("tied matrix updated twice", "tied_matrix_updated_twice", PP2, "embed_tokens", (OPTIMIZER,), home=MORE),
    Bug(
        "second moment of a part is stale",
        "second_moment_of_the_second_step",
        ZERO1,
        "*",
        (OPTIMIZER,),
        more={"steps": 4},
        home=MORE,
    ),
    Bug(
        "gradients accumulated in bf16",
        "gradients_accumulated_in_bf16",
        DP2,
        "*",
        (REDUCTION,),
        more={"accumulation": 2},
        home=MORE,
    ),
    Bug(
        "gradient of a bias doubled, activations sharded too",
        "bias_gradient_doubled",
        {**TP2, "tensor_parallel": {"sequence_parallel": True}},
        "h.1.mlp.c_proj",
        (WEIGHT,),
        "gpt2",
        home=MORE,
    ),
    Bug(
        "gradient of a bias summed over parts of rows twice",
        "bias_gradient_doubled",
        SP2,
        "h.1.mlp.c_proj",
        (REDUCTION,),
        "gpt2",
        home=MORE,
    ),
    Bug(
        "auxiliary loss times the microbatches",
        "auxiliary_loss_times_microbatches",
        PP2,
        "mlp",
        (INPUT, FORWARD),
        AUXILIARY,
        home=MORE,
    ),
    Bug(
        "a router's gradient 10 % small",
        "router_gradient_a_little_small",
        PP2,
        "gate",
        (WEIGHT,),
        "mixtral",
        home=MORE,
    ),
    Bug(
        "gradient of the first batch lost",
        "first_batch_of_a_part_lost",
        ZERO2,
        "*",
        (REDUCTION,),
        more={"accumulation": 2},
        home=MORE,
    ),
    Bug(
        "positions of each part of a row from zero",
        "positions_of_a_part_from_zero",
        SP2,
        "rotary_emb",
        (FORWARD,),
        home=MORE,
    ),
    Bug(
        "heads not exchanged, backward only", "exchange_not_undone_in_backward", SP2, "self_attn", (INPUT,), home=MORE
    ),
    Bug("label between two parts of a row lost", "label_between_parts_lost", SP2, "loss", (INPUT,), home=MORE),
    Bug(
        "gradients of parts of rows averaged, not summed",
        "gradients_of_parts_averaged",
        SP2,
        "",
        (REDUCTION,),
        home=MORE,
    ),
    Bug(
        "weights of experts without gradient",
        "weights_of_experts_without_gradient",
        EP2,
        "mlp",
        (INPUT,),
        "mixtral",
        home=MORE,
    ),
    Bug(
        "results of experts in another order",
        "results_of_experts_in_another_order",
        EP2,
        "layers.0.mlp",
        (FORWARD,),
        "mixtral",
        home=MORE,
    ),
    Bug(
        "gradients of experts averaged twice",
        "gradients_of_experts_averaged_twice",
        EP2,
        "experts",
        (REDUCTION,),
        "mixtral",
        home=MORE,
    ),
)


@dataclass(frozen=True)
class Sound:
    """A layout without a bug.

    Args:
        model: Of `ALL_MODELS`.
        settings: The layout.
        dtype: Of the products.
        more: Other arguments of `verify`.
    """

    model: str
    settings: dict[str, Any]
    dtype: str = "fp32"
    more: dict[str, Any] | None = None

    @property
    def layout(self) -> str:
        """In words."""
        return ", ".join([name_of(self.settings), *(f"{name} {value}" for name, value in (self.more or {}).items())])

    @property
    def key(self) -> str:
        """In the report."""
        return f"{self.model} {self.layout} {self.dtype}"


SOUND = [
    Sound(model, layout, dtype)
    for model in MODELS
    for layout in (PP2, TP2, {**PP2, **TP2})
    for dtype in ("fp32", "bf16")
]
SOUND += [Sound(model, ZERO1, dtype) for model in ("llama", "gpt2", "mixtral") for dtype in ("fp32", "bf16")]
SOUND += [Sound("llama", layout, "fp16") for layout in (PP2, TP2, ZERO1)]
SOUND += [Sound("odd llama", layout) for layout in (PP2, TP2, {**PP2, **TP2}, ZERO1, ZERO2, ZERO3, SP2)]
SOUND += [
    Sound("odd llama", {"pp_size": 2, "num_microbatches": 2}, more={"rows": 3}),
    Sound("odd llama", PP2, more={"rows": 1}),
    Sound("odd llama", SP2, more={"length": 15, "rows": 1}),
    Sound("odd llama", SP2, "bf16", more={"length": 15}),
    Sound("odd llama", {**SP2, **ZERO3}, more={"length": 13}),
    Sound("llama", {**SP2, **PP2}),
    Sound("llama", {**SP2, **TP2}),
    Sound("llama", {**SP2, **ZERO1}),
    Sound("gpt2", SP2),
    Sound("mixtral", SP2),
    *(
        Sound("llama", {**PP2, "schedule": name})
        for name in ("gpipe", "interleaved_1f1b", "zbv_zero_bubble", "dualpipev")
    ),
    *(Sound("gpt2", {**PP2, "schedule": name}, "bf16") for name in ("interleaved_zero_bubble", "zbv_zero_bubble")),
    *(Sound("mixtral", EP2, dtype) for dtype in ("fp32", "bf16")),
    Sound("mixtral", {**EP2, **ZERO1}, more={"rows": 3}),
    Sound("mixtral", {**EP2, **PP2}, more={"rows": 3}),
    *(Sound(AUXILIARY, layout) for layout in (PP2, TP2, DP2, EP2)),
    *(Sound(model, ZERO2, more={"accumulation": 2}) for model in ("llama", "gpt2")),
    *(Sound(model, ZERO3, more={"accumulation": 2}) for model in ("llama", "mixtral")),
    Sound("llama", ZERO3, "bf16"),
    Sound("llama", {**TP2, "tensor_parallel": {"sequence_parallel": True}}),
    Sound("gpt2", {**PP2, "activation_checkpointing": {"every": 1}}),
]


def name_of(settings: dict[str, Any]) -> str:
    """Of a layout."""
    axes = [f"{axis}{settings[f'{axis}_size']}" for axis in ("pp", "tp", "sp", "ep") if f"{axis}_size" in settings]
    zero = settings.get("zero", {}).get("stage")
    named = [*axes, *(["dp2"] if not axes or axes == ["ep2"] or (zero and not {"sp_size"} & settings.keys()) else [])]
    more = [f"zero{zero}"] if zero else []
    more += [settings["schedule"]] if "schedule" in settings else []
    more += ["sequence_parallel"] if "tensor_parallel" in settings else []
    more += ["checkpointing"] if "activation_checkpointing" in settings else []
    return " ".join(["x".join(named), *more])
