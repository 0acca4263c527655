"""What a model is called with by place has the names of its own forward, also where a wrapper's forward has none."""

from __future__ import annotations

import inspect
from typing import Any

import tiny
from peft import LoraConfig, TaskType, get_peft_model

from hf_parallel.model.samples import signature_of


def names(model: Any) -> list[str]:
    return list(signature_of(model).parameters)[:2]


def test_adapters_without_a_task_take_what_their_model_takes() -> None:
    plain = names(tiny.llama())
    assert plain == ["input_ids", "attention_mask"]
    nameless = get_peft_model(tiny.llama(), LoraConfig(target_modules=["q_proj"]))
    assert "input_ids" not in inspect.signature(nameless.forward).parameters
    assert names(nameless) == plain
    task = get_peft_model(tiny.llama(), LoraConfig(target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM))
    assert names(task) == plain
