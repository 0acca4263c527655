"""Plans: the right role for every linear, without touching the model, the same every time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tp_models import plan_sample, roles, tiny_model

from hf_parallel.engine.plan.shards import judge_fallbacks, vocabulary_modules
from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import Section
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.shard_plan import TPPlan


@pytest.mark.parametrize("case", ["llama", "llama_tied", "gpt2", "qwen3", "phi3", "llama_kv1", "llama_kv4"])
def test_everything_but_the_head_is_paired_where_heads_divide(case: str) -> None:
    model = tiny_model(case)
    plan = plan_tensor_parallel(model, 2, plan_sample())
    assert len(plan.pairs) == 4
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    expected = {} if tied else {"lm_head": "gather"}
    assert {name: role for name, role in roles(plan).items() if role not in ("column", "row", "latent")} == expected
    linear_like = {n for n, p in model.named_parameters() if p.ndim == 2 and ("layers" in n or ".h." in n)}
    assert linear_like == {f"{name}.weight" for name, role in roles(plan).items() if role != "gather"}
    assert "lm_head" in plan.fallbacks
    coverage = plan.coverage()
    assert coverage.paired > 0.7
    assert coverage.paired + coverage.gathered + coverage.replicated == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tp_size", "heads", "key_values"),
    [(2, [6, 3], [2, 1]), (3, [3, 3, 3], [1, 1, 1]), (4, [3, 2, 2, 2], [1, 1, 2, 1])],
)
def test_heads_that_do_not_divide_are_shared_out_unevenly(
    tp_size: int, heads: list[int], key_values: list[int]
) -> None:
    plan = plan_tensor_parallel(tiny_model("smollm2"), tp_size, plan_sample())
    assert len(plan.pairs) == 4
    assert {role for name, role in roles(plan).items() if "layers" in name} == {"column", "row"}
    query, key = (plan.linears[f"model.layers.0.self_attn.{kind}_proj"] for kind in "qk")
    assert [query.weight.local_size(tp_size, rank) for rank in range(tp_size)] == [4 * count for count in heads]
    held = [key.weight.local_size(tp_size, rank) for rank in range(tp_size)]
    used = [sum(length for _, length in ranges) for ranges in key.take] if key.take else held
    assert used == [4 * count for count in key_values]
    assert held == (used if tp_size < 4 else [12] * 4), "three key-value heads are stored whole by four ranks"


def test_fused_and_shared_projections_are_cut_by_section() -> None:
    gpt2 = plan_tensor_parallel(tiny_model("gpt2"), 2, plan_sample()).shard_specs()
    assert gpt2["transformer.h.0.attn.c_attn.weight"].sections == (Section(32, True),) * 3
    assert gpt2["transformer.h.0.attn.c_attn.weight"].dim == 1
    assert gpt2["transformer.h.0.attn.c_attn.bias"].dim == 0
    assert gpt2["transformer.h.0.mlp.c_proj.weight"].dim == 0
    assert "transformer.h.0.mlp.c_proj.bias" not in gpt2
    phi3 = plan_tensor_parallel(tiny_model("phi3"), 2, plan_sample()).shard_specs()
    assert phi3["model.layers.1.self_attn.qkv_proj.weight"].sections == (
        Section(32, True),
        Section(16, True),
        Section(16, True),
    )
    assert phi3["model.layers.1.mlp.gate_up_proj.weight"].sections == (Section(48, True),) * 2
    mqa = plan_tensor_parallel(tiny_model("llama_kv1"), 2, plan_sample()).shard_specs()
    assert "model.layers.0.self_attn.k_proj.weight" not in mqa, "the only key head is whole on every rank"
    assert mqa["model.layers.0.self_attn.q_proj.weight"].sections == (Section(32, True),)


def test_norms_over_a_head_are_partial_and_no_others() -> None:
    plan = plan_tensor_parallel(tiny_model("qwen3"), 2, plan_sample())
    partial = {name for pair in plan.pairs for name in pair.partial}
    assert partial == {f"model.layers.{i}.self_attn.{kind}_norm.weight" for i in range(2) for kind in "qk"}


@pytest.mark.parametrize("case", ["gpt2", "phi3", "qwen3"])
def test_a_plan_is_deterministic_and_survives_json(case: str) -> None:
    plan = plan_tensor_parallel(tiny_model(case), 2, plan_sample())
    torch.manual_seed(99)
    again = plan_tensor_parallel(tiny_model(case), 2, plan_sample())
    assert plan == again
    restored = TPPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert restored == plan
    assert restored.fingerprint() == again.fingerprint()
    assert plan.fingerprint() != plan_tensor_parallel(tiny_model(case), 4, plan_sample()).fingerprint()


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items()},
        "buffers": {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()},
        "flags": {name: (p.requires_grad, id(p), p.grad) for name, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
        "attributes": {
            n: {k: v for k, v in vars(m).items() if isinstance(v, (int, str, float))} for n, m in model.named_modules()
        },
        "patched": [n for n, m in model.named_modules() if "forward" in vars(m)],
        "random": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a is b or a == b)


@pytest.mark.parametrize("case", ["gpt2", "phi3", "qwen3"])
def test_planning_leaves_the_model_and_the_random_state_alone(case: str) -> None:
    model = tiny_model(case).train()
    model.get_input_embeddings().eval()
    next(model.parameters()).requires_grad_(False)
    list(model.parameters())[3].grad = torch.ones_like(list(model.parameters())[3])
    model.register_buffer("counter", torch.zeros(()))
    model.register_forward_hook(lambda module, args, output: module.counter.add_(1) and None)
    before = snapshot(model)
    plan_tensor_parallel(model, 2, plan_sample())
    after = snapshot(model)
    for key in before:
        assert same(before[key], after[key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", ["llama", "gpt2", "phi3", "qwen3"])
def test_other_precisions_get_the_same_plan(case: str, dtype: torch.dtype) -> None:
    expected = plan_tensor_parallel(tiny_model(case), 2, plan_sample())
    assert plan_tensor_parallel(tiny_model(case, dtype), 2, plan_sample()) == expected


@pytest.mark.parametrize("case", ["llama", "llama_kv1", "gpt2", "phi3", "qwen3"])
def test_the_attention_kernel_does_not_change_the_plan(case: str) -> None:
    expected = plan_tensor_parallel(tiny_model(case), 2, plan_sample())
    assert plan_tensor_parallel(tiny_model(case, attention="sdpa"), 2, plan_sample()) == expected


def test_zero_and_equal_weights_do_not_fool_the_verification() -> None:
    model = tiny_model("gpt2")
    expected = plan_tensor_parallel(model, 2, plan_sample())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0 if parameter.ndim == 2 else 1.0)
    assert plan_tensor_parallel(model, 2, plan_sample()) == expected


def test_frozen_parameters_do_not_hide_the_data_flow() -> None:
    model = tiny_model("llama").requires_grad_(False)
    assert len(plan_tensor_parallel(model, 2, plan_sample()).pairs) == 4


def test_one_rank_shards_nothing() -> None:
    plan = plan_tensor_parallel(tiny_model("llama"), 1, plan_sample())
    assert plan.shard_specs() == {}
    assert plan.coverage().replicated == 1.0


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = tiny_like_meta()
    with pytest.raises(PlanError, match=r"meta device.*Give the model weights before it is planned"):
        plan_tensor_parallel(model, 2, plan_sample())


def tiny_like_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def test_a_tp_size_below_one_is_refused() -> None:
    with pytest.raises(PlanError, match="tp_size=0"):
        plan_tensor_parallel(tiny_model("llama"), 0, plan_sample())


@pytest.mark.parametrize(("on_fallback", "refused"), [("error", True), ("warn", False), ("ignore", False)])
def test_on_fallback_decides_what_layers_without_a_pair_mean(on_fallback: Any, refused: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plan = plan_tensor_parallel(model, 2, {"input": torch.randn(3, 5, 8)})
    assert set(plan.fallbacks) == {"0", "2"}, "no module contains the two"
    if refused:
        with pytest.raises(PlanError, match=r"0: gathered.*on_fallback to warn"):
            judge_fallbacks(plan, on_fallback, 0, frozenset())
    else:
        judge_fallbacks(plan, on_fallback, 0, frozenset())
    for case in ("llama", "llama_kv1", "smollm2"):
        even = tiny_model(case)
        judge_fallbacks(plan_tensor_parallel(even, 2, plan_sample()), "error", 0, vocabulary_modules(even))
