"""What blocks that run again cost in predictions: how many do, and how far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig

from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.errors import ConfigError
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.links import traffic
from hf_parallel.planner.predict import Estimate, predict
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of, settings_of
from hf_parallel.settings.config import HFParallelConfig


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 192,
    "vocab_size": 96,
}
LARGE = LlamaConfig(hidden_size=4096, num_hidden_layers=8, num_attention_heads=32, intermediate_size=11008)
ONE = Cluster(1, 1, "a100_80")


def _flops_backward(config: Any, stack: str, *, again: bool) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if again:
        recompute_blocks(model, stack, [range(0, 1), range(1, 2)])
    ids = torch.arange(32)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("config", "stack"),
    [
        (LlamaConfig(**SIZES), "model.layers"),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96), "transformer.h"),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, resid_pdrop=0.0), "transformer.h"),
        (Gemma2Config(**SIZES, head_dim=16), "model.layers"),
    ],
    ids=["llama", "gpt2 with dropout", "gpt2", "gemma2: a norm at the end"],
)
def test_a_block_runs_again_without_the_product_that_no_backward_reads(config: Any, stack: str) -> None:
    added = _flops_backward(config, stack, again=True) - _flops_backward(config, stack, again=False)
    profile = profile_of(config)
    block = profile.kinds[0]
    unread = None if profile.has_dropout else block.unread
    left = 0 if unread is None else unread.inputs * unread.outputs
    scores = 2 * 32 * block.heads * block.head_dim  # the whole square
    assert added / (2 * 2 * 32) == pytest.approx(block.active + scores - left, rel=0.02)


def test_experts_run_again_to_their_end() -> None:
    assert profile_of(MixtralConfig(**SIZES, num_local_experts=4)).kinds[0].unread is None


def _predicted(**layout: Any) -> Estimate:
    return predict(LARGE, ONE, {"micro_batch": 2, "num_microbatches": 2, **layout}, seq_len=2048)


def test_some_blocks_that_run_again_cost_their_share() -> None:
    none, half, all_of_them = (
        _predicted(**how)
        for how in ({}, {"recompute": "full", "recompute_share": 0.5}, {"recompute": "full", "recompute_share": 1.0})
    )
    assert half.step_s == pytest.approx((none.step_s + all_of_them.step_s) / 2, rel=1e-6)
    assert all_of_them.total_bytes < half.total_bytes < none.total_bytes
    assert half.memory_bytes["activations"] == pytest.approx(
        (none.memory_bytes["activations"] + all_of_them.memory_bytes["activations"]) / 2, rel=0.25
    )


def test_other_systems_run_a_block_to_its_end() -> None:
    """Megatron's checkpoints do, DeepSpeed's too; torch's stop, as this package's do."""

    def added(**how: Any) -> float:
        return _predicted(recompute="full", **how).step_s - _predicted(**how).step_s

    assert added(engine="deepspeed") > 1.2 * added(engine="native")
    fused = {"kernels": "fused", "attention": "flash"}
    assert added(**fused) > 1.2 * added(**fused, engine="fsdp2")


def test_the_sum_after_a_product_that_does_not_run_again_travels_once() -> None:
    pair, profile = Cluster(1, 2, "a100_80"), profile_of(LARGE)
    layouts = (
        {"tp": 2, "recompute": recompute, "sequence_parallel": shared}
        for shared in (False, True)
        for recompute in ("none", "full")
    )
    none, full, shared, shared_full = (traffic(profile, pair, layout_of(layout), 2048)["tp"].gpu for layout in layouts)
    assert none == shared
    assert full == pytest.approx(none * 5 / 4)
    assert shared_full == pytest.approx(shared * 5.5 / 4)


def test_alternate_checkpoints_are_one_block_in_so_many() -> None:
    section = {"activation_checkpointing": {"every": 4, "mode": "alternate"}}
    spec = layout_of(mapping_of(HFParallelConfig.from_mapping(section, source="test"), 1, 1))
    assert (spec.recompute, spec.recompute_share, spec.recompute_every) == ("full", 0.25, 4)
    made = settings_of(layout_of({"recompute": "full", "recompute_share": 0.333})).activation_checkpointing
    assert (made.every, made.mode) == (3, "alternate")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"recompute": "full", "recompute_share": 0}, r"recompute_share=0: expected .* above 0 to 1\. Set it to 0\.5"),
        ({"recompute": "full", "recompute_share": True}, r"recompute_share=true: expected"),
        ({"recompute_share": 0.5}, r"recompute_share=0\.5 with recompute=none: .* Set recompute to full"),
        ({"zero": 2, "zero_owners": True}, r"zero_owners with zero=2: .* Set zero to 1"),
    ],
)
def test_what_has_no_effect_is_refused(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(layout)


def test_a_share_that_this_package_cannot_run_is_not_written() -> None:
    with pytest.raises(ConfigError, match=r"recompute_share=0\.4: this package .* Set it to 1, 0\.5, 0\.333 or less"):
        settings_of(layout_of({"recompute": "full", "recompute_share": 0.4}))


def test_owners_of_whole_tensors_send_a_message_each_that_passes_all_ranks() -> None:
    """InternEvo's ZeRO 1: 7B on 1024 GPUs took 7.2 s a step, with the optimizer inside a node 4.5 s."""
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008)
    layout = {"zero": 1, "micro_batch": 2, "num_microbatches": 4, "kernels": "norms", "attention": "flash"}

    def added(nodes: int) -> float:
        cluster = Cluster(nodes, 8, "a100_80", inter_gbit_s=400)
        steps = (
            predict(config, cluster, layout | {"dp": 8 * nodes, "zero_owners": owners}, seq_len=2048).step_s
            for owners in (False, True)
        )
        parts, owners = steps
        return owners - parts

    assert 0 < added(1) < 0.4
    assert 2 < added(128) < 3.5
    assert added(128) == pytest.approx(2 * added(64), rel=0.25)
