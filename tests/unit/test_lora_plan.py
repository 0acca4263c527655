"""Stages of a PEFT model are planned and checked through its wrappers.

If these fail, a model with adapters cannot be cut, or the proof before the first step compares something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_parallel.compat.private_quantised import keep_trainable
from hf_parallel.engine.plan.self_check import _check_stages, _Cut
from hf_parallel.errors import UnsupportedError
from hf_parallel.model.samples import tiny_samples
from hf_parallel.model.support import refuse_model
from hf_parallel.pipeline_parallel.plan.costs import block_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.stage_plan import Span


def cut_of(model: Any) -> tuple[_Cut, list[dict[str, Any]]]:
    samples = [dict(sample) for sample in tiny_samples(tiny.VOCAB, device=torch.device("cpu"), use_cache=False)]
    return _Cut(model, discover_stages(model, samples[0]), [0, 2, 4]), samples


def test_the_stack_is_found_below_the_wrappers_and_adapters_lie_with_their_layers() -> None:
    cut, _ = cut_of(tiny.llama_lora())
    plan = cut.plan
    assert plan.stack == "base_model.model.model.layers"
    first, last = Span(0, 2, False), Span(2, 4, True)
    query = f"{plan.stack}.1.self_attn.q_proj.lora_A.default.weight"
    assert (plan.holds(first, query), plan.holds(last, query)) == (True, False)


def test_parameters_that_share_memory_are_refused() -> None:
    model = tiny.llama_lora()
    first, second = (block.self_attn.q_proj.lora_A.default for block in model.get_base_model().model.layers[:2])
    second.weight = torch.nn.Parameter(first.weight.data)
    with pytest.raises(UnsupportedError, match=r"share memory, with 2 ranks a copy.*Tie them"):
        refuse_model(model, 2)
    refuse_model(model, 1)


def test_planning_leaves_tensors_where_a_method_of_peft_keeps_them() -> None:
    from peft import ShiraConfig, get_peft_model

    model = get_peft_model(tiny.llama(), ShiraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    cut, samples = cut_of(
        model
    )  # on shapes alone: its forward puts indices, which are no buffers, where its weights are
    assert _check_stages(cut, "on", [(0,), (1,)], samples)
    assert torch.isfinite(model(**samples[0]).loss)


def test_a_forward_that_was_put_over_the_wrapped_model_is_left_out_of_the_check() -> None:
    model = tiny.llama_lora()
    cut, samples = cut_of(model)
    assert _check_stages(cut, "on", [(0,), (1,)], samples)
    genuine = model.get_base_model().forward
    model.get_base_model().forward = lambda *args, **kwargs: genuine(*args, **kwargs)  # of this very model
    assert _check_stages(cut, "on", [(0,), (1,)], samples)
    assert "forward" in vars(model.get_base_model())


def test_quantised_matrices_weigh_as_much_in_the_cut_as_those_that_they_stand_for(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    tiny.llama().save_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options = {"quantization_config": how, "dtype": torch.float32, "attn_implementation": "eager"}
    packed = tiny.lora(AutoModelForCausalLM.from_pretrained(tmp_path, **options))
    keep_trainable(packed)
    before = {name: id(p) for name, p in packed.named_parameters()}
    costs = []
    for model in (tiny.llama_lora(), packed):
        cut, _ = cut_of(model)
        costs.append(block_costs(model, cut.plan, flops_per_byte=0.0))
    assert costs[1].blocks == pytest.approx(costs[0].blocks, rel=1e-6)
    assert costs[1].last == costs[0].last
    assert {name: id(p) for name, p in packed.named_parameters()} == before  # planning left the packed ones in place
