"""The planner's memory of what this package runs is the peak of dry runs of the same recipe, and of others their formula."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import yaml
from transformers import AutoConfig, LlamaConfig

from hf_parallel.activation_checkpointing.recorded import checkpoint_of
from hf_parallel.dry_run.rank.recipe import dry_run_recipe
from hf_parallel.errors import ConfigError
from hf_parallel.memory import moments, record
from hf_parallel.memory.activations import of_logit_in_tile
from hf_parallel.memory.block import LENGTHS, trace_block
from hf_parallel.memory.experts import stay_whole
from hf_parallel.memory.unread import build_on_meta
from hf_parallel.memory.variant import PLAIN, Variant
from hf_parallel.planner.adapters import is_beside
from hf_parallel.planner.constants import constants
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.memory import saved_by_block
from hf_parallel.planner.own import recorded_of
from hf_parallel.planner.predict import predict, step_of
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.sections import ActivationCheckpointingConfig


WIDE: Final = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192}
GATED: Final = WIDE | {"intermediate_size": 1408, "num_key_value_heads": 8}
TYPES: Final[dict[str, dict[str, Any]]] = {
    "llama": GATED,
    "mistral": GATED | {"num_key_value_heads": 2, "sliding_window": None},
    "qwen3": GATED | {"head_dim": 64},
    "gemma2": GATED | {"head_dim": 64, "sliding_window": 128},
    "gpt2": {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8192},
    "gpt_neox": WIDE | {"intermediate_size": 2048},
    "opt": WIDE | {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8192},
    "phi": GATED,
    "olmo2": GATED,
}
# Experts whose weights autocast leaves in fp32; values that are narrower than queries; rows that are filled up to chunks.
ODD: Final[dict[str, dict[str, Any]]] = {
    "mamba2": {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8192, "num_heads": 16, "head_dim": 64}
    | {"state_size": 64, "n_groups": 1},
    "mixtral": GATED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Of which two tp ranks would have 502 each, no whole number of 16 bytes.
    "olmoe": GATED | {"intermediate_size": 1004, "num_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v3": WIDE
    | {"intermediate_size": 1408, "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": 192}
    | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 8},
}
SECTIONS: Final[dict[str, dict[str, Any]]] = {
    "pp2": {"pp_size": 2, "pipeline": {"num_microbatches": 4}},
    "tp2": {"tp_size": 2},
    "tp2 with a shared sequence": {"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "recompute": {"activation_checkpointing": {"every": 1}},
    "selective": {"activation_checkpointing": {"every": 2, "mode": "selective"}},
    "gpipe": {"pp_size": 2, "pipeline": {"num_microbatches": 4, "schedule": "gpipe"}},
    "compressed": {"gradient_compression": {"method": "powersgd"}},
    "tp2 with a shared sequence, recompute": {
        "tp_size": 2,
        "tensor_parallel": {"sequence_parallel": True},
        "activation_checkpointing": {"every": 1},
    },
}
FURTHER: Final[dict[str, dict[str, Any]]] = {
    "sp2": {"sp_size": 2},
    "ring of sp2": {"sp_size": 2, "sp_attention": "ring"},
    "optimizer on the host": {"zero": {"stage": 2, "offload_optimizer": "cpu"}},
    "all on the host": {"zero": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}},
    "local steps": {"local_sgd": {"sync_every": 4}},
}
ROWS, LENGTH, WITHIN = 4, 512, 0.05


def allocated(config: Any, layout: dict[str, Any], cluster: Cluster, length: int = LENGTH) -> float:
    """Bytes that are predicted to be allocated."""
    terms = predict(config, cluster, layout, seq_len=length).memory_bytes
    return sum(terms.values()) - terms["overhead"]


def adapters_of(model: Any, rank: int) -> int:
    """Parameters of LoRA of so high a rank on all linear layers but the head."""
    built = build_on_meta(model)
    layers = [module for module in built.modules() if isinstance(module, torch.nn.Linear)]
    return sum(rank * sum(one.weight.shape) for one in layers if one is not built.get_output_embeddings())


def difference(
    name: str, section: str, dtype: str, folder: Path, lora_rank: int = 0, *, rows: int = ROWS, length: int = LENGTH
) -> float:
    """Prediction over the dry run of the rank that has most, less 1, of two GPUs that are cut as the prediction is."""
    model, settings = AutoConfig.for_model(name, **(TYPES | ODD)[name]), (SECTIONS | FURTHER)[section]
    cluster, config = Cluster(1, 2, "h100"), HFParallelConfig.from_mapping(settings)
    layout = mapping_of(config, 2, rows, "fp32" if dtype == "fp32" else "bf16")
    layout |= {} if dtype == "half" else {"param_dtype": "fp32"}
    layout |= {"adapters": adapters_of(model, lora_rank)} if lora_rank else {}
    if config.pp_size > 1:
        counts = step_of(profile_of(model), cluster, layout_of(layout), length, constants()).counts
        settings = settings | {"pipeline": settings["pipeline"] | {"split": list(counts)}}
    accelerate = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
    accelerate |= {"num_machines": 1, "mixed_precision": "no" if dtype == "fp32" else "bf16"}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(accelerate | {"parallelism_config": {"hf_parallel": settings}}))
    precision = "half" if dtype == "half" else None
    peaks = [
        dry_run_recipe(
            recipe, model, rank=rank, rows=rows, length=length, precision=precision, lora_rank=lora_rank
        ).peak_bytes
        for rank in range(config.pp_size)
    ]
    return allocated(model, layout, cluster, length) / max(peaks) - 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "section", "dtype"),
    [
        ("gpt2", "tp2", "fp32"),
        *(
            pytest.param(*more, "bf16", marks=pytest.mark.long)
            for more in (
                *(("llama", "zero1"), ("gpt2", "selective"), ("olmo2", "tp2 with a shared sequence")),
                *(("llama", "tp2 with a shared sequence, recompute"), ("mixtral", "pp2"), ("deepseek_v3", "tp2")),
                *(("olmoe", "tp2"), ("mixtral", "tp2 with a shared sequence")),
            )
        ),
        *(pytest.param("llama", section, "bf16", marks=pytest.mark.long) for section in ("gpipe", "compressed")),
        ("mixtral", "zero3", "bf16"),
        pytest.param("mamba2", "zero1", "bf16", marks=pytest.mark.long),
        pytest.param("gpt2", "zero1", "half", marks=pytest.mark.long),
    ],
)
def test_predicted_memory_is_the_peak_of_a_dry_run(name: str, section: str, dtype: str, tmp_path: Path) -> None:
    assert abs(difference(name, section, dtype, tmp_path)) <= WITHIN


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("section", "microbatches"),
    [
        ("tp2 with a shared sequence", 1),
        pytest.param("gpipe of many microbatches, recompute", 16, marks=pytest.mark.long),
    ],
)
def test_predicted_memory_of_few_tokens_and_of_many_microbatches(
    section: str, microbatches: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside few tokens casts of parameters count, in many microbatches what stages receive."""
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 6}
    monkeypatch.setitem(TYPES, "llama", sizes | {"intermediate_size": 1152, "vocab_size": 1000})
    pipeline = {"schedule": "gpipe", "num_microbatches": microbatches}
    many = {"pp_size": 2, "pipeline": pipeline, "activation_checkpointing": {"every": 1}}
    monkeypatch.setitem(SECTIONS, "gpipe of many microbatches, recompute", many)
    assert abs(difference("llama", section, "bf16", tmp_path, rows=4 * microbatches, length=256)) <= 0.03


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("section", "dtype", "rank"),
    [
        ("zero1", "bf16", 8),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("zero3", "bf16", 8), ("zero1", "half", 8), ("zero1", "half", 96), ("pp2", "bf16", 8))
        ),
    ],
)
def test_predicted_memory_of_adapters_is_the_peak_of_a_dry_run(
    section: str, dtype: str, rank: int, tmp_path: Path
) -> None:
    """A frozen block keeps less: no weight of it needs what a norm has made of the hidden states, or a product's input."""
    pytest.importorskip("peft")
    assert abs(difference("llama", section, dtype, tmp_path, lora_rank=rank)) <= WITHIN


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", TYPES)
def test_every_predicted_memory_is_the_peak_of_a_dry_run(name: str, section: str, dtype: str, tmp_path: Path) -> None:
    assert abs(difference(name, section, dtype, tmp_path)) <= WITHIN


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("section", FURTHER)
def test_predicted_memory_of_shared_rows_hosts_and_slow_networks(section: str, dtype: str, tmp_path: Path) -> None:
    assert abs(difference("llama", section, dtype, tmp_path)) <= WITHIN


CAPPED: Final = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(("name", "steps"), [("gemma2", (3, 1)), ("cohere", (1, 0)), ("llama", (0, 0))])
def test_scales_and_caps_of_logits_are_counted_with_what_autograd_keeps_of_them(
    name: str, steps: tuple[int, int]
) -> None:
    """A cap divides, takes the tanh, which its backward needs, and multiplies."""
    recorded = record.record_step(AutoConfig.for_model(name, **CAPPED | {"num_key_value_heads": 4}), "fp32")
    assert recorded is not None
    assert recorded.steps == steps


def test_a_tile_of_capped_logits_has_six_times_their_bytes_in_fp32() -> None:
    """Product, tanh, logits, exponentials and two gradients, as dry runs of Gemma 2 list them; others have one tile."""
    assert [of_logit_in_tile(4.0, *steps) for steps in ((0, 0), (1, 0), (3, 1))] == [4, 16, 24]
    assert [of_logit_in_tile(2.0, *steps) for steps in ((0, 0), (1, 0), (3, 1))] == [12, 14, 16]


def test_every_tensor_parallel_rank_has_masks_whole() -> None:
    recorded = record.record_step(AutoConfig.for_model("gemma2", **CAPPED | {"num_key_value_heads": 4}), "fp32")
    assert recorded is not None
    masks = tuple(one for one in recorded.embedding if one.square)
    kept = [
        moments.summed(masks, moments.Batch(1000, 1000, tp, shared)).kept
        for tp, shared in ((1, False), (2, False), (2, True))
    ]
    assert kept == pytest.approx([8e6] * 3, rel=0.01)  # two of 4 bytes, of all tokens and of a window


def test_layouts_that_only_other_systems_have_keep_their_formula() -> None:
    profile = profile_of(LlamaConfig(**TYPES["llama"]))
    for other in ({"kernels": "fused"}, {"state_bytes": (2, 4, 12)}, {"loss": "fused"}, {"dtype": "fp8"}):
        assert recorded_of(profile, layout_of(other)) is None
    for own in ({}, {"sp": 2}):
        assert recorded_of(profile, layout_of(own)) is not None


def test_a_config_is_recorded_once_for_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stock = record.record_step
    monkeypatch.setattr(record, "record_step", lambda *given: calls.append(given) or stock(*given))
    config = LlamaConfig(**TYPES["llama"] | {"vocab_size": 777})
    for layout in ({}, {"micro_batch": 2}, {"param_dtype": "fp32"}, {"recompute": "full"}, {"attention": "eager"}):
        predict(config, Cluster(1, 1, "h100"), layout, seq_len=64)
    assert [(one, how.attention, how.checkpoint is not None) for _, one, how in calls] == [
        ("half", None, False),
        ("autocast", None, False),
        ("half", None, True),
        ("half", "eager", False),
    ]


def test_models_that_differ_in_depth_alone_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recording takes a second; every file of settings and every layout of a model asks for one."""
    lengths: list[int] = []
    stock = record._run
    monkeypatch.setattr(record, "_run", lambda *given: lengths.append(given[1]) or stock(*given))
    found = []
    again = Variant(checkpoint=checkpoint_of(ActivationCheckpointingConfig(every=1)))
    for changed, variant in (
        ({}, PLAIN),
        ({"num_hidden_layers": 9}, PLAIN),
        ({"intermediate_size": 160}, PLAIN),
        ({}, again),
        ({"num_hidden_layers": 9}, Variant(checkpoint=checkpoint_of(ActivationCheckpointingConfig(every=1)))),
    ):
        found.append(
            record.record_step(LlamaConfig(**TYPES["llama"] | {"vocab_size": 780} | changed), "half", variant)
        )
    assert len(lengths) == 3 * len(LENGTHS)
    assert found[0] is found[1]
    assert found[3] is found[4]
    assert len({id(one) for one in found}) == 3


def test_a_model_that_cannot_be_recorded_is_not_tried_again_with_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(record, "record_step", lambda *given: calls.append(given))
    config = LlamaConfig(**TYPES["llama"] | {"vocab_size": 778})
    for layout in ({}, {"recompute": "full"}):
        predict(config, Cluster(1, 1, "h100"), layout, seq_len=64)
    assert len(calls) == 1


def test_a_model_that_cannot_be_recorded_keeps_what_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Mamba's blocks, which have no heads and no feed-forward part, a formula knew nothing."""
    monkeypatch.setattr(record, "record_step", lambda *given: None)
    config = LlamaConfig(**TYPES["llama"] | {"vocab_size": 779})
    profile, found = profile_of(config), trace_block(config, "autocast")
    assert found is not None
    for tp, kept in ((1, found.shared + found.split), (2, found.shared + found.split / 2)):
        spec = layout_of({"param_dtype": "fp32", "tp": tp})
        assert saved_by_block(profile, profile.kinds[0], spec, 64) == pytest.approx(kept)


def test_stored_scores_grow_with_the_square_of_the_length() -> None:
    config, cluster = LlamaConfig(**TYPES["llama"]), Cluster(1, 1, "h100")
    growths = []
    for attention in ("sdpa", "eager"):
        short, middle, long = (allocated(config, {"attention": attention}, cluster, n) for n in (1024, 2048, 4096))
        growths.append((long - middle) / (middle - short))
    assert growths[0] == pytest.approx(2.0, rel=1e-3)
    assert growths[1] > 3.5


def test_states_are_whole_and_activations_are_what_they_add() -> None:
    """Gradients are not there when activations are: the term of the latter is what is beyond them."""
    config = LlamaConfig(**TYPES["llama"])
    terms = predict(config, Cluster(1, 1, "h100"), {}, seq_len=64).memory_bytes
    parameters = profile_of(config).parameters
    assert [terms[name] for name in ("weights", "gradients", "optimizer")] == [
        2 * parameters,
        2 * parameters,
        12 * parameters,
    ]
    assert min(terms.values()) >= 0


def test_a_frozen_base_has_the_dtype_in_which_it_was_loaded() -> None:
    config, cluster, parameters = LlamaConfig(**TYPES["llama"]), Cluster(1, 1, "h100"), 10**5
    whole = profile_of(config).parameters
    for more, size in (({}, 2), ({"param_dtype": "fp32"}, 4)):
        terms = predict(config, cluster, {"adapters": parameters, **more}, seq_len=64).memory_bytes
        assert terms["weights"] == pytest.approx(size * whole + 4 * parameters)  # PEFT's adapters are in fp32
        assert (terms["gradients"], terms["optimizer"]) == pytest.approx((4 * parameters, 8 * parameters))


def test_more_than_a_tenth_may_be_adapters_and_counts_as_what_needs_more() -> None:
    config, cluster = LlamaConfig(**TYPES["llama"]), Cluster(1, 1, "h100")
    whole = profile_of(config).parameters
    shares = (0.09, 0.11, 0.24, 0.26)
    found = [allocated(config, {"adapters": int(share * whole)}, cluster) for share in shares]
    assert found[1] >= found[0]
    assert found[2] > found[1]
    assert found[3] < found[2]  # so many are layers of the model's own


def test_more_than_a_quarter_are_adapters_where_a_layout_says_so() -> None:
    """A dry run of LoRA of rank 256 has 1030 MB; as layers of the model's own it was taken for 903."""
    config, cluster = LlamaConfig(**TYPES["llama"]), Cluster(1, 1, "h100")
    given = {"micro_batch": ROWS, "adapters": adapters_of(config, 256)}
    assert given["adapters"] > profile_of(config).parameters / 2
    as_number, beside, own = (
        allocated(config, given | {"adapters_are": whose}, cluster) for whose in ("auto", "beside", "own")
    )
    assert beside == pytest.approx(1_030_000_000, rel=0.01)
    assert as_number == own < 0.9 * beside
    few = given | {"adapters": adapters_of(config, 8)}
    assert allocated(config, few | {"adapters_are": "own"}, cluster) != allocated(config, few, cluster)


@pytest.mark.parametrize("more", [{"adapters": 10**9}, {"adapters": 3 * 10**7, "block_bits": 4.13}])
def test_what_cannot_be_the_models_own_is_beside_it(more: dict[str, Any]) -> None:
    """More than the model has, or any of a base whose quantised weights are not trained."""
    profile = profile_of(LlamaConfig(**TYPES["llama"]))
    assert is_beside(profile, layout_of(more))
    assert not is_beside(profile, layout_of({"adapters": 3 * 10**7}))


def test_whose_adapters_are_is_refused_without_them() -> None:
    with pytest.raises(
        ConfigError, match="adapters_are=beside without adapters: it says of the trained parameters whose they are"
    ):
        layout_of({"adapters_are": "beside"})
    with pytest.raises(
        ConfigError, match=r"adapters_are=own with block_bits=4\.13: quantised weights are not trained"
    ):
        layout_of({"adapters": 1000, "adapters_are": "own", "block_bits": 4.13})
    with pytest.raises(ConfigError, match=r"adapters_are='besides': unknown\. Did you mean beside"):
        layout_of({"adapters": 1000, "adapters_are": "besides"})


def test_experts_whose_parts_are_no_whole_units_stay_whole() -> None:
    """A dry run of a rank of 4 has 33.88e6 parameters and 1031 MB; if tp cut all of them it would be 10.83e6 and 481 MB."""
    assert [stay_whole(width, 4) for width in (0, 1000, 1008, 1024)] == [False, True, False, False]
    assert [stay_whole(1024, tp) for tp in (1, 2, 3)] == [False, False, True]
    sizes = ODD["olmoe"] | {"num_hidden_layers": 4}
    layout, cluster = {"tp": 4, "dtype": "fp32", "micro_batch": ROWS, "chunked_loss": True}, Cluster(1, 4, "h100")
    terms = [
        predict(AutoConfig.for_model("olmoe", **sizes | {"intermediate_size": width}), cluster, layout, seq_len=LENGTH)
        for width in (1000, 1008)
    ]
    odd, cut = (one.memory_bytes for one in terms)
    assert odd["weights"] == pytest.approx(4 * 33_884_672, rel=1e-3)
    assert odd["weights"] > 3 * cut["weights"]
    assert sum(odd.values()) - odd["overhead"] == pytest.approx(1_030_753_280, rel=0.01)
    assert terms[0].step_s > terms[1].step_s


def test_a_card_that_takes_one_microbatch_has_no_gradients_beside_its_logits() -> None:
    """Published: Llama 3 8B with torch's AdamW in bf16 on one 80 GB card, 2 x 8192 tokens, needs 83.8 GB."""
    config = LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    )
    layout = {"micro_batch": 2, "recompute": "full", "state_bytes": (2, 2, 4)}
    once, twice = (
        predict(config, Cluster(1, 1, "h100"), layout | {"num_microbatches": count}, seq_len=8192) for count in (1, 2)
    )
    assert once.total_bytes == pytest.approx(83.8e9, rel=0.02)
    assert twice.memory_bytes["gradients"] == once.memory_bytes["gradients"]
    assert twice.total_bytes - once.total_bytes == pytest.approx(once.memory_bytes["gradients"], rel=0.1)


def test_the_arithmetic_imports_no_torch() -> None:
    code = "import hf_parallel.planner.search, sys; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert result.stdout.strip() == "[]"


def test_other_systems_hold_memory_where_there_is_room_and_are_not_refused_for_it() -> None:
    def overhead(gigabytes: float, **more: Any) -> tuple[float, float]:
        layout = {"dp": 8, "kernels": "fused", "attention": "flash", "zero": 1, **more}
        cluster = Cluster(1, 8, "a100_80", gpu_memory_gb=gigabytes)
        found = predict(LlamaConfig(**GATED), cluster, layout, seq_len=LENGTH)
        return found.memory_bytes["overhead"], found.total_bytes

    held, total = overhead(80)
    assert held == pytest.approx(0.105 * 80e9, rel=0.3)
    assert total <= 80e9
    used = total - held
    close, full = overhead((used + 2e9) / 1e9)
    assert close < 2e9 <= held
    assert full <= used + 2e9
    assert overhead(80, kernels="eager")[0] < 2e9  # this package's own
    assert overhead(80, engine="fsdp2", zero=3)[0] < 2e9


def test_deepspeed_fetches_no_whole_block_of_a_large_model() -> None:
    def buffers(engine: str, hidden: int) -> float:
        wide = {
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": hidden // 128,
            "vocab_size": 1024,
        }
        layout = {"dp": 64, "zero": 3, "engine": engine, "kernels": "fused", "state_bytes": (2, 2, 12)}
        cluster = Cluster(8, 8, "a100_80", gpu_memory_gb=1000)
        return predict(LlamaConfig(**wide, num_hidden_layers=8), cluster, layout, seq_len=LENGTH).memory_bytes[
            "buffers"
        ]

    assert buffers("deepspeed", 4096) == buffers("fsdp2", 4096)
    largest = 4 * 20480**2  # a parameter; more than the 1e9 that may be whole at once
    assert buffers("deepspeed", 20480) == pytest.approx(2 * largest + 2 * largest)
    assert buffers("fsdp2", 20480) > 3 * buffers("deepspeed", 20480)
