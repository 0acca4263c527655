"""Whole experts on each rank: only what is routed to them is computed there, and the sum is the whole model's.

If these fail, an expert's tokens are computed twice, or nowhere, or a gradient of a router is partial.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from thinning import half_long, in_turns
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from zoo.models import quiet

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import Section, ShardSpec
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.cost import bytes_per_rank, flops_coverage, traffic
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_virtual_ranks, virtual_groups
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.expert_routing import install_routing
from hf_parallel.tensor_parallel.shard_plan import Routing, TPPlan


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def made(name: str, tp_size: int = 2, implementation: str = "eager", **options: Any) -> tuple[Any, Any, TPPlan]:
    with quiet():
        model: Any = zoo.build(name)
        if implementation == "eager":
            model = model.double()
        if implementation:
            model.set_experts_implementation(implementation)
        batch = zoo.batch(name, model)
        return model, batch, plan_model(model, tp_size, batch, **({"experts": "whole"} | options))


def routed(plan: TPPlan) -> list[Any]:
    return [pair for pair in plan.pairs if pair.routing is not None]


@pytest.mark.parametrize(
    ("name", "tp_size", "implementation"),
    half_long(
        in_turns(["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"], [2, 3], ["eager", "grouped_mm", "batched_mm"])
    ),
)
def test_whole_experts_are_exact_with_every_implementation(name: str, tp_size: int, implementation: str) -> None:
    model, batch, plan = made(name, tp_size, implementation)
    assert routed(plan)
    assert not [reason for reason in plan.fallbacks.values() if "whole" in reason]
    verify_model(model, plan, batch)


@pytest.mark.parametrize("name", ["dbrx", "olmoe", "nemotron_h"])
def test_other_layouts_are_exact(name: str) -> None:
    model, batch, plan = made(name)
    assert routed(plan)
    verify_model(model, plan, batch)


def test_each_rank_holds_its_experts_and_all_of_the_router() -> None:
    _, _, plan = made("gpt_oss", 3)
    (pair, *_) = routed(plan)
    assert pair.row == "model.layers.0.mlp.experts"
    specs = plan.shard_specs()
    held = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    for name in held:
        assert specs[f"{pair.row}.{name}"] == ShardSpec(0, (Section(4, True, 0),))
        assert [specs[f"{pair.row}.{name}"].local_size(3, rank) for rank in range(3)] == [2, 1, 1]
    assert [rewrite.values for rewrite in pair.rewrites] == [(2, 1, 1)]
    assert not any(name.startswith("model.layers.0.mlp.router") for name in specs)
    assert TPPlan.from_json(plan.to_json()) == plan


def test_a_choice_is_computed_on_one_rank_only() -> None:
    model, batch, plan = made("mixtral")
    pair = routed(plan)[0]
    choices: list[int] = [0, 0]
    groups = virtual_groups(2, 30.0)

    def main(rank: int) -> None:
        sharded = copy.deepcopy(model)
        apply_tensor_parallel(sharded, plan, groups[rank], rank, lambda name: True)
        experts = sharded.get_submodule(pair.row)
        inner = experts.tp_routed_inner

        def counted(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            assert 0 <= int(index.min()) <= int(index.max()) < 2
            choices[rank] += index.numel()
            return inner(hidden, index, weights)

        experts.tp_routed_inner = counted
        sharded(**batch)

    run_virtual_ranks(groups, main)
    per_token = model.config.num_experts_per_tok
    assert sum(choices) == batch["input_ids"].numel() * per_token
    assert min(choices) > 0


class Constant(nn.Module):
    """Two experts that multiply by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[[2.0]], [[3.0]]]))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return (x.unsqueeze(1) * self.scale[index].flatten(2) * weights.unsqueeze(-1)).sum(1)


def test_a_rank_without_a_token_has_zero_gradients() -> None:
    module = Constant()
    module.scale.data = module.scale.data[1:]
    install_routing(module, Routing(0, "index", "weights", 2), 2, 1)
    x, weights = torch.randn(4, 3, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    out = module(x, index=torch.zeros(4, 2, dtype=torch.int64), weights=weights)
    assert out.shape == x.shape
    assert module(x.bfloat16(), index=torch.zeros(4, 2, dtype=torch.int64), weights=weights).dtype == torch.bfloat16
    grads = torch.autograd.grad(out.sum(), [x, weights, module.scale])
    assert all(
        grad.shape == t.shape and not grad.any() for grad, t in zip(grads, [x, weights, module.scale], strict=True)
    )


def test_fewer_experts_than_ranks_are_refused_with_numbers() -> None:
    message = r"experts: whole with tp_size=5, but .*: model\.layers\.0\.mlp\.experts has 4 experts for 5 ranks\. Set"
    with pytest.raises(PlanError, match=message):
        made("mixtral", 5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama4", r"feed_forward\.experts is no stack of experts that is called with .* indices i\[N K\]"),
        ("phi3", "no module owns stacked experts"),
    ],
)
def test_models_without_such_experts_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(
        PlanError, match=rf"no experts can be placed whole on ranks: .*{reason}.*Set tensor_parallel\.experts"
    ):
        made(name, implementation="") if name == "phi3" else made(name)


class Habit(MixtralExperts):
    """Experts that look at all tokens, so that they cannot be called on some of them."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = super().forward(x, index, weights) * x.mean(0).sigmoid()
        return result


def test_experts_that_do_not_verify_are_split_with_the_reason() -> None:
    model, batch, _ = made("mixtral")
    model.model.layers[1].mlp.experts.__class__ = Habit
    plan = plan_model(model, 2, batch, experts="whole")
    name = "model.layers.1.mlp.experts"
    assert name not in {pair.row for pair in routed(plan)}
    assert plan.fallbacks[name].startswith("not whole experts: the output differs by ")
    assert plan.shard_specs()[f"{name}.down_proj"].dim == 2
    verify_model(model, plan, batch)


def test_what_cost_reports_follows_from_the_experts_of_each_rank() -> None:
    _, _, whole = made("mixtral", 3)
    _, _, split = made("mixtral", 3, experts="split")
    assert traffic(whole, 4) == traffic(split, 4), "the same sums go over the wire"
    assert flops_coverage(whole).paired == pytest.approx(flops_coverage(split).paired)
    specs = whole.shard_specs()
    experts = sum(numel for name, numel in whole.numel.items() if ".experts." in name)
    rest = [
        4
        * sum(
            numel * (specs[name].local_size(3, rank) / specs[name].full_size if name in specs else 1.0)
            for name, numel in whole.numel.items()
            if ".experts." not in name
        )
        for rank in range(3)
    ]
    assert bytes_per_rank(whole, 4) == [
        round(rest[rank] + 4 * experts * share) for rank, share in enumerate((0.5, 0.25, 0.25))
    ]
