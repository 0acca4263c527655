"""What the planner counts of a config is what the model has and does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planner_types import LENGTH, SHAPE, TYPES, config_of_type
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from hf_parallel.errors import ConfigError
from hf_parallel.planner.profile import ModelProfile, profile_of


WITH_EXPERTS = {"mixtral", "qwen3_moe", "olmoe"}


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_parameters_are_those_of_the_model(kind: str) -> None:
    config = config_of_type(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert profile_of(config).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", sorted(set(TYPES) - WITH_EXPERTS))
def test_products_are_those_that_a_forward_runs(kind: str) -> None:
    config = config_of_type(kind, attn_implementation="eager")
    profile = profile_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long), use_cache=False)
    blocks = [profile.kinds[layer] for layer in profile.layers]
    square = sum(2 * LENGTH**2 * block.heads * (block.head_dim + block.value_dim) for block in blocks)
    rotary = 2 * LENGTH * SHAPE["hidden_size"]  # angles of positions are a product in most models
    counted = 2 * LENGTH * profile.active + square
    assert counter.get_total_flops() == pytest.approx(counted, abs=rotary, rel=0.005)


@pytest.mark.parametrize(("kind", "active", "stored"), [("mixtral", 2, 4), ("qwen3_moe", 2, 4), ("olmoe", 2, 4)])
def test_a_token_passes_its_experts_alone(kind: str, active: int, stored: int) -> None:
    (block,) = profile_of(config_of_type(kind)).kinds
    experts = [one for one in block.products if one.stored > 1]
    width = 32 if kind == "qwen3_moe" else 128
    assert {(one.times, one.stored) for one in experts} == {(active, stored)}
    assert sum(one.inputs * one.outputs for one in experts) == 3 * 64 * width
    assert block.is_gated
    assert block.width == active * width


def test_every_kind_of_block_is_told_apart() -> None:
    config = config_of_type("gemma2", num_hidden_layers=4, sliding_window=16)
    profile = profile_of(config)
    assert [profile.kinds[layer].window for layer in profile.layers] == [16, None, 16, None]
    assert profile.kinds[profile.layers[0]].pairs(64) == 16 * 17 / 2 + 48 * 16


def test_the_megatron_gpt_is_twelve_squares_a_block() -> None:
    profile = profile_of(config_of_type("gpt2"))
    (block,) = profile.kinds
    assert block.active == 12 * 64**2
    assert [one.cut for one in block.products] == ["column", "row", "column", "row"]
    assert (profile.tied, profile.has_dropout, block.has_rms, block.is_gated) == (True, True, False, False)
    assert profile.flops(128) == 6 * (3 * 12 * 64**2 + 96 * 64) + 12 * 3 * 64 * 128


def test_products_of_llama_are_cut_into_columns_and_rows() -> None:
    (block,) = profile_of(config_of_type("llama", num_key_value_heads=2)).kinds
    assert [one.cut for one in block.products] == ["column"] * 3 + ["row"] + ["column"] * 2 + ["row"]
    assert (block.kv_heads, block.head_dim, block.is_gated, block.has_rms) == (2, 16, True, True)


def test_a_profile_is_kept_by_the_content_of_the_config() -> None:
    first = profile_of(config_of_type("llama"))
    assert profile_of(config_of_type("llama")) is first
    assert profile_of(config_of_type("llama", intermediate_size=96)) is not first
    assert isinstance(profile_of(first), ModelProfile)


def test_a_path_is_the_config_that_is_there(tmp_path: Path) -> None:
    config = config_of_type("llama")
    config.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert profile_of(path) == profile_of(config)
    with pytest.raises(ConfigError, match="no config found"):
        profile_of(tmp_path / "none.json")


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a transformers config, or a path"):
        profile_of(3)
