"""Stages of a PEFT model are planned and checked through its wrappers.

If these fail, a model with adapters cannot be cut, or the proof before the first step compares something else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tiny
import torch

from hf_parallel.engine.self_check import _check_stages
from hf_parallel.model.samples import tiny_samples
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.stage_plan import Span


def cut_of(model: Any) -> Any:
    samples = list(tiny_samples(tiny.VOCAB, device=torch.device("cpu"), use_cache=False))
    plan = discover_stages(model, samples[0])
    return SimpleNamespace(
        stages=plan, bounds=[0, 2, 4], schedule=SimpleNamespace(stages_of_ranks=[(0,), (1,)])
    ), samples


def test_the_stack_is_found_below_the_wrappers_and_adapters_lie_with_their_layers() -> None:
    cut, _ = cut_of(tiny.MODELS["llama_tied_lora_tied"]())
    plan = cut.stages
    assert plan.stack == "base_model.model.model.layers"
    first, last = Span(0, 2, False), Span(2, 4, True)
    query = f"{plan.stack}.1.self_attn.q_proj.lora_A.default.weight"
    assert (plan.holds(first, query), plan.holds(last, query)) == (True, False)
    # The adapter of the head is that of the embedding, transposed: one memory, so both stages need both.
    for name in (
        "base_model.model.lm_head.lora_A.default.weight",
        "base_model.model.model.embed_tokens.lora_embedding_B.default",
    ):
        assert plan.holds(first, name)
        assert plan.holds(last, name)


def test_a_forward_that_was_put_over_the_wrapped_model_is_left_out_of_the_check() -> None:
    model = tiny.llama_lora()
    cut, samples = cut_of(model)
    _check_stages(model, "on", cut, samples)
    genuine = model.get_base_model().forward
    model.get_base_model().forward = lambda *args, **kwargs: genuine(*args, **kwargs)  # of this very model
    _check_stages(model, "on", cut, samples)
    assert "forward" in vars(model.get_base_model())
