"""A plan made from a config alone must be the one that the model itself gets.

If these fail, a plan that was made ahead does not fit the model, or a block of an unusual kind gets the plan of another.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig
from zoo.models import quiet, tiny_config

import hf_parallel
from hf_parallel import PlanError, plan_for
from hf_parallel.tensor_parallel.plan import plan_for as module
from hf_parallel.tensor_parallel.shard_plan import TPPlan


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


def llama(depth: int = 7, **options: Any) -> PretrainedConfig:
    return LlamaConfig(**LLAMA, num_hidden_layers=depth, **options)


def deep(name: str, depth: int, **options: Any) -> PretrainedConfig:
    """The zoo's tiny config of a type with more blocks; lists with an entry for each block are repeated."""
    config = copy.deepcopy(tiny_config(name))
    blocks = config.num_hidden_layers
    values = config.to_dict() | options
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == blocks and key not in options:
            values[key] = [value[i % blocks] for i in range(depth)]
    values |= {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): depth}
    values.pop("model_type", None)
    with quiet():
        return type(config)(**values)


def configs() -> dict[str, PretrainedConfig]:
    hybrid = ["linear_attention", "linear_attention", "full_attention"] * 3
    return {
        "llama": llama(),
        "llama_tied": llama(tie_word_embeddings=True),
        "llama_shallow": llama(2),
        "gpt2": deep("gpt2", 6),
        "mixtral": deep("mixtral", 5),
        "gpt_oss": deep("gpt_oss", 6, layer_types=["sliding_attention", "full_attention"] * 3),
        "qwen3_next": deep("qwen3_next", 9, layer_types=hybrid),
        "deepseek_v3": deep("deepseek_v3", 7, first_k_dense_replace=2),
        "mamba": deep("mamba", 6),
    }


def kept(config: PretrainedConfig) -> int:
    """Number of blocks of the model that is planned."""
    with quiet():
        blueprint = module.Blueprint(config, zoo.models.AutoModelForCausalLM.from_config)
        reduced = module._reduce(blueprint, module.skeleton(blueprint), {})
    return config.num_hidden_layers if reduced is None else reduced.depth


def plans(config: PretrainedConfig, **options: Any) -> tuple[TPPlan, TPPlan]:
    """From the config, and from a model of it whose weights are others."""
    torch.manual_seed(11)
    with quiet():
        model = zoo.models.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
        return plan_for(config, 2, **options), plan_for(model, 2, **options)


EXPECTED_DEPTHS = {
    "llama": 2,
    "llama_tied": 2,
    "llama_shallow": 2,
    "gpt2": 2,
    "mixtral": 2,
    "gpt_oss": 3,
    "qwen3_next": 4,
    "deepseek_v3": 4,
    "mamba": 2,
}


@pytest.mark.parametrize("name", EXPECTED_DEPTHS)
def test_the_plan_of_a_config_is_that_of_its_model(name: str) -> None:
    config = configs()[name]
    assert kept(config) == EXPECTED_DEPTHS[name]
    mine, expected = plans(config)
    assert mine.to_json() == expected.to_json()
    assert mine.fingerprint() == expected.fingerprint()
    assert expected.pairs


def test_the_plan_includes_vocabulary_and_overrides() -> None:
    mine, expected = plans(llama(6), overrides={"model.layers.3.*": "gather", "model.layers.5.mlp.*": "replicate"})
    assert "model.layers.5.mlp.up_proj" in mine.whole
    assert mine.linears["lm_head"].role == expected.linears["lm_head"].role == "vocab_head"
    assert mine == expected
    assert {n for n, linear in mine.linears.items() if linear.role == "gather"} == {
        f"model.layers.3.{part}"
        for part in [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    }


def test_whole_experts_are_repeated() -> None:
    mine, expected = plans(configs()["deepseek_v3"], experts="whole")
    assert [pair.row for pair in mine.pairs if pair.routing] == [f"model.layers.{i}.mlp.experts" for i in range(2, 7)]
    assert mine.to_json() == expected.to_json()


def test_the_config_is_read_from_a_folder_and_left_as_it_is(tmp_path: Path) -> None:
    config = llama()
    before = config.to_dict()
    config.save_pretrained(tmp_path)
    state = torch.random.get_rng_state()
    assert plan_for(tmp_path, 2) == plan_for(config, 2) == hf_parallel.plan_for(str(tmp_path), 2)
    assert config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_blocks_that_no_prefix_shows_keep_the_full_depth() -> None:
    config = deep("qwen3_next", 5, layer_types=["linear_attention"] * 4 + ["full_attention"])
    assert kept(config) == 5
    mine, expected = plans(config)
    assert mine.to_json() == expected.to_json()


def test_widths_beyond_the_memory_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    config = LlamaConfig(**{**LLAMA, **sizes}, num_hidden_layers=80)
    needed = r"LlamaForCausalLM of random weights with its real widths needs \d+\.\d GB \(\d\.\d\d billion .*, 1\.1 GB are free"
    monkeypatch.setattr(module, "_free_bytes", lambda: 2**30)
    with pytest.raises(PlanError, match=needed):
        plan_for(config, 2)


def test_a_model_gets_the_plan_of_the_config_it_was_made_from() -> None:
    model = LlamaForCausalLM(llama(3)).to(torch.bfloat16)
    assert plan_for(model, 2) == plan_for(model.config, 2)
