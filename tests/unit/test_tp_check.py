"""The three ways pairs that verify alone can be wrong together, and the whole-model check that must see them."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tp_models import plan_sample, tiny_model

from hf_parallel.errors import PlanError
from hf_parallel.model.copies import rebind_forwards
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.shard_plan import TPPlan


WIDTH = 16


class Chain(nn.Module):
    """Three linears in a row: the middle one is the row of one pair and the column of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class BiasedAttention(nn.Module):
    """Attention with a bias per head that is passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, position_bias: Tensor) -> Tensor:
        heads = (x.shape[0], x.shape[1], self.num_heads, -1)
        q, k, v = (linear(x).view(heads).transpose(1, 2) for linear in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) + position_bias).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class LearnedBias(nn.Module):
    """The bias is a parameter of the outer module, so its gradient leaves the block through an input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 4, 5, 5))
        self.attention = BiasedAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, position_bias=self.bias)


class ScaledMLP(nn.Module):
    """A learned scale that is passed in and used by every rank for its part, without any heads dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * scale))


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.mlp = ScaledMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x, self.scale)


class ForeignRead(nn.Module):
    """A projection whose weight is also used by code outside of it, as a tied head would."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = ScaledMLP()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mlp(x, x.new_ones(1))
        return F.linear(hidden, self.mlp.up.weight)


class Escape(nn.Module):
    """The first linear's output is also part of the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = EscapingMLP()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, inner = self.block(x)
        return x + hidden, inner


class EscapingMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.up(x))
        return self.down(inner), inner


class Wrapped(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def sample() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))}


def planned(model: nn.Module) -> TPPlan:
    plan = plan_tensor_parallel(model, 2, sample())
    verify_model(model, plan, sample())
    return plan


def test_a_linear_is_in_one_pair_only() -> None:
    plan = planned(Wrapped(Chain()))
    assert {name: linear.role for name, linear in plan.linears.items()} == {
        "block.a": "column",
        "block.b": "row",
        "block.c": "gather",
    }
    assert "already belongs to another pair" in plan.fallbacks["block.c"]


def test_a_sliced_learned_input_gets_its_whole_gradient() -> None:
    plan = planned(LearnedBias())
    (pair,) = plan.pairs
    assert [(rule.path, rule.dim, rule.heads) for rule in pair.inputs] == [(("position_bias",), -3, 4)]


def test_a_learned_input_used_in_parts_gets_its_whole_gradient() -> None:
    plan = planned(LearnedScale())
    (pair,) = plan.pairs
    assert [(rule.path, rule.dim) for rule in pair.inputs] == [((1,), None)]


def test_a_weight_read_outside_its_module_stays_whole() -> None:
    plan = planned(ForeignRead())
    assert "mlp.up" not in plan.linears
    assert "read by code outside" in plan.fallbacks["mlp.up"]


def test_a_projection_whose_output_leaves_the_model_is_not_paired() -> None:
    plan = planned(Escape())
    assert {linear.role for linear in plan.linears.values()} == {"gather"}


@pytest.mark.parametrize("case", ["llama", "llama_odd", "llama_kv1", "smollm2", "gpt2", "qwen3", "phi3"])
@pytest.mark.parametrize("tp_size", [2, 3])
def test_the_whole_model_check_passes_on_derived_plans(case: str, tp_size: int) -> None:
    model = tiny_model(case)
    verify_model(model, plan_tensor_parallel(model, tp_size, plan_sample()), plan_sample())


def without_partial(plan: TPPlan) -> TPPlan:
    return replace(plan, pairs=tuple(replace(pair, partial=()) for pair in plan.pairs))


def without_rewrites(plan: TPPlan) -> TPPlan:
    return replace(plan, pairs=tuple(replace(pair, rewrites=()) for pair in plan.pairs))


def without_sections(plan: TPPlan) -> TPPlan:
    name = "transformer.h.0.attn.c_attn"
    one = type(plan.linears[name].weight).contiguous(1, 96)
    return replace(plan, linears={**plan.linears, name: replace(plan.linears[name], weight=one)})


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        (
            "qwen3",
            without_partial,
            r"tp_size=2: .* in 4 quantities by more than 1e-03: "
            r"gradient of model\.layers\.0\.self_attn\.q_norm\.weight \(relative error \d\.\de[+-]\d\d\).*plan to gather",
        ),
        ("phi3", without_rewrites, r"differs|does not run"),
        ("gpt2", without_sections, r"differs.*output 0"),
    ],
)
def test_the_whole_model_check_sees_a_damaged_plan(
    case: str, damage: Callable[[TPPlan], TPPlan], message: str
) -> None:
    model = tiny_model(case)
    plan = plan_tensor_parallel(model, 2, plan_sample())
    with pytest.raises(PlanError, match=message):
        verify_model(model, damage(plan), plan_sample())


def bound(model: Any) -> None:
    """As TRL and accelerate do it: the original is bound to the model, also in copies."""
    original = model.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def nested(model: Any) -> None:
    bound(model)
    model.forward = functools.partial(lambda inner, *args, **kwargs: inner(*args, **kwargs), model.forward)


def held(model: Any) -> None:
    genuine = type(model).forward
    model.forward = lambda *args, **kwargs: genuine(model, *args, **kwargs)


def given(model: Any) -> None:
    """As in a loop over layers, where a closure would see the last one."""
    model.forward = lambda *args, inner=model.forward, **kwargs: inner(*args, **kwargs)


def given_first(model: Any) -> None:
    model.forward = lambda inner=model.forward, **kwargs: inner(**kwargs)


@pytest.mark.parametrize("patch", [bound, nested, held, given, given_first])
def test_a_function_over_the_forward_hides_no_damage(patch: Callable[[Any], None]) -> None:
    model = tiny_model("gpt2")
    plan = plan_tensor_parallel(model, 2, plan_sample())
    patch(model)
    verify_model(model, plan, plan_sample())
    with pytest.raises(PlanError, match=r"differs.*output 0"):
        verify_model(model, without_sections(plan), plan_sample())
    expected = model(**plan_sample())[0]
    copied = copy.deepcopy(model)
    rebind_forwards(copied, model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert float(copied(**plan_sample())[0].detach().abs().max()) == 0.0
    torch.testing.assert_close(model(**plan_sample())[0], expected)


class NamedCalls(nn.Module):
    """Linears called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=torch.tanh(self.up(input=x)))


class SharedNorm(nn.Module):
    """An activation that knows all of its features; in training alone, unless it is `always` so."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=-1, keepdim=True)) if self.training or self.always else torch.tanh(x)


def with_activation(activation: nn.Module) -> Any:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = activation
    return model


@pytest.mark.parametrize("labelled", [True, False])
def test_code_that_runs_in_training_alone_is_compared(labelled: bool) -> None:
    model = with_activation(SharedNorm())
    batch = plan_sample()
    batch = {**batch, "labels": batch["input_ids"]} if labelled else batch
    with pytest.raises(PlanError, match="in training mode, the sharded model differs"):
        verify_model(model, plan_tensor_parallel(model, 2, batch), batch)
    always = with_activation(SharedNorm(always=True))
    verify_model(always, plan_tensor_parallel(always, 2, batch), batch)


class Drawn(nn.Module):
    """What draws in training, and not by dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * (1 + torch.rand(x.shape[:1])[..., None, None] if self.training else 1)


def test_what_draws_in_training_is_compared_without_that() -> None:
    model = with_activation(Drawn())
    batch = plan_sample()
    verify_model(model, plan_tensor_parallel(model, 2, batch), {**batch, "labels": batch["input_ids"]})
    model = with_activation(nn.Sequential(nn.Tanh(), nn.Dropout(0.5)))
    verify_model(model, plan_tensor_parallel(model, 2, batch), {**batch, "labels": batch["input_ids"]})
    assert not model.training


def test_linears_called_by_keyword_are_paired() -> None:
    assert len(planned(Wrapped(NamedCalls())).pairs) == 1


class Sinks(BiasedAttention):
    """Attention with one learned score per head, and a buffer of one slope per head."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))
        self.register_buffer("slopes", torch.tensor([0.5, 1.0, 1.5, 2.0]))

    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:
        return super().forward(x, (self.sinks.exp() * self.slopes).view(-1, 1, 1) * torch.eye(x.shape[1]))


def test_parameters_and_buffers_with_one_entry_per_head_are_sliced() -> None:
    specs = planned(Wrapped(Sinks())).shard_specs()
    assert specs["block.sinks"].full_size == specs["block.slopes"].full_size == 4


def test_a_block_that_sits_at_two_places_has_a_layout_under_both_names() -> None:
    model = nn.Module()
    model.first = model.second = ScaledMLP()
    model.forward = lambda x: model.second(model.first(x, torch.ones(1)), torch.ones(1))  # type: ignore[method-assign]
    plan = plan_tensor_parallel(model, 2, sample())
    specs = plan.shard_specs()
    assert len(plan.pairs) == 1
    assert specs["first.up.weight"] == specs["second.up.weight"]
