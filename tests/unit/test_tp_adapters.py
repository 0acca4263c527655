"""Which adapters a tensor-parallel plan takes, and that its proof is not blind to adapters that are still zero.

If these fail, a kind of adapter without exact shards trains wrong in silence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import peft
import pytest
import tiny
from tp_models import plan_sample

import hf_parallel
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.tensor_parallel.plan.verify_model import verify_model


def config(kind: type, **options: Any) -> Any:
    return kind(**{"task_type": "CAUSAL_LM", **options})


REFUSED = {
    "use_dora": config(peft.LoraConfig, target_modules=["q_proj"], use_dora=True),
    "ADALORA": config(peft.AdaLoraConfig, target_modules=["q_proj"], total_step=10),
    "VERA": config(peft.VeraConfig, target_modules=["q_proj"]),
    "LOHA": config(peft.LoHaConfig, target_modules=["q_proj"]),
    "PromptTuningConfig": config(peft.PromptTuningConfig, num_virtual_tokens=3),
    "trainable_token_indices": config(peft.LoraConfig, target_modules=["q_proj"], trainable_token_indices=[1, 2]),
}


@pytest.mark.parametrize("word", REFUSED)
def test_adapters_without_exact_shards_are_refused_by_name(word: str) -> None:
    model = peft.get_peft_model(tiny.llama(layers=2), REFUSED[word])
    with pytest.raises(UnsupportedError, match=rf"{word}.*tp_size"):
        hf_parallel.plan_for(model, 2, sample=plan_sample())


def test_adapters_of_stacked_experts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"target_parameters.*tp_size"):
        hf_parallel.plan_for(tiny.MODELS["mixtral_lora_experts"](), 2, sample=plan_sample())


def test_merged_adapters_are_refused() -> None:
    model = tiny.llama_lora()
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match=r"merged.*tp_size"):
        hf_parallel.plan_for(model, 2, sample=plan_sample())


def test_the_self_check_sees_adapters_that_are_zero() -> None:
    adapters = config(peft.LoraConfig, target_modules="all-linear", r=4)
    model = peft.get_peft_model(tiny.llama(layers=2), adapters)
    assert all(not bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)
    plan = hf_parallel.plan_for(model, 2, sample=plan_sample())
    verify_model(model, plan, plan_sample())
    wrong = dataclasses.replace(plan, pairs=tuple(dataclasses.replace(pair, partial=()) for pair in plan.pairs))
    with pytest.raises(PlanError, match="lora_A"):
        verify_model(model, wrong, plan_sample())
    assert all(not bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


def test_factors_are_cut_like_the_layers_that_they_are_on() -> None:
    model = tiny.llama_lora()
    plan = hf_parallel.plan_for(model, 2, sample=plan_sample())
    specs = plan.shard_specs()
    block = "base_model.model.model.layers.0"
    for layer, factor in (("q_proj", "lora_B"), ("o_proj", "lora_A")):
        base = specs[f"{block}.self_attn.{layer}.base_layer.weight"]
        assert specs[f"{block}.self_attn.{layer}.{factor}.default.weight"] == base
        whole = {"lora_A": "lora_B", "lora_B": "lora_A"}[factor]
        assert f"{block}.self_attn.{layer}.{whole}.default.weight" not in specs
    assert not plan.fallbacks
    names = {name for pair in plan.pairs for name in pair.partial}
    assert len(names) == 4 * 7
