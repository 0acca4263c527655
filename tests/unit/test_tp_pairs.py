"""Every kind of pair on a tiny model of that kind: what is split, what stays whole, and that it is exact.

If these fail, a kind of layer falls back to gathers or to full copies on every rank, or trains wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from thinning import half_long, in_turns
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.models import quiet
from zoo.shards import sweep_shards

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.shard_plan import TPPlan


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def planned(name: str, tp_size: int = 2, **options: Any) -> TPPlan:
    with quiet():
        model = zoo.build(name)
        inputs = zoo.batch(name, model)
        del inputs["labels"]
        return plan_tensor_parallel(model, tp_size, inputs, **options)


FULL = [
    "bloom",  # slopes per head come in as an input
    "dbrx",  # matrices of all experts below each other
    "deepseek_v3",  # latent attention
    "falcon",  # one key-value head fused to the queries
    "falcon_mamba",  # inner sum over ranks, norms after it
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",  # query, key and value interleaved by head
    "gpt_oss",  # sinks, experts with interleaved halves and biases
    "mamba",  # inner sum over ranks, convolution per channel
    "mamba2",  # sections, norm over all channels
    "minimax",  # decays per head, norm over all heads
    "olmo2",  # norms over all heads
    "phi3",
    "qwen3_next",  # gated delta rule beside attention
    "recurrent_gemma",  # recurrence with a block-diagonal gate
    "zamba2@2blocks",  # blocks that share their weights
]
LONG = (
    "falcon_mamba",
    "gpt_bigcode",
    "minimax",
    "recurrent_gemma",
    "zamba2@2blocks",
)  # have most in common with others


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FULL])
def test_two_ranks_are_exact_and_everything_is_split(name: str) -> None:
    row = sweep_shards(name, 2)
    assert row.verdict == "exact", row.note
    assert row.paired + row.gathered > 0.8
    if name != "zamba2@2blocks":  # a linear that feeds a sum with the residual cannot be a column
        assert row.fully_paired, row.left


@pytest.mark.parametrize(
    ("name", "tp_size"), half_long(in_turns(["deepseek_v3", "gpt_oss", "llama", "mamba2", "olmo2", "phi3"], [3, 4]))
)
def test_more_ranks_are_exact(name: str, tp_size: int) -> None:
    row = sweep_shards(name, tp_size)
    assert row.verdict == "exact", row.note


def kinds(plan: TPPlan, layer: str) -> dict[str, str]:
    return {n.removeprefix(layer): linear.role for n, linear in plan.linears.items() if n.startswith(layer)}


def test_latent_projections_stay_whole_and_their_outputs_are_used_in_parts() -> None:
    plan = planned("deepseek_v3")
    layer = "model.layers.0.self_attn."
    assert kinds(plan, layer) == {
        "q_b_proj": "column",
        "kv_a_proj_with_mqa": "latent",
        "kv_b_proj": "column",
        "o_proj": "row",
    }
    assert plan.linears[f"{layer}q_b_proj"].entry
    assert not plan.linears[f"{layer}kv_b_proj"].entry, "its input is used in parts already"
    assert f"{layer}kv_a_layernorm.weight" in next(p for p in plan.pairs if p.row == f"{layer}o_proj").partial
    assert "narrow projection" in plan.whole[f"{layer}q_a_proj"]


def test_norms_over_all_heads_run_on_gathered_channels() -> None:
    plan = planned("olmo2")
    pair = next(pair for pair in plan.pairs if pair.row == "model.layers.0.self_attn.o_proj")
    assert {name.rpartition(".")[2] for name in pair.norms} == {"q_norm", "k_norm"}
    assert set(pair.partial) == {f"{name}.weight" for name in pair.norms}


def test_a_mixer_is_split_by_channel_with_one_inner_sum() -> None:
    plan = planned("mamba")
    layer = "backbone.layers.0.mixer."
    assert kinds(plan, layer) == {"in_proj": "column", "x_proj": "reduce", "out_proj": "row"}
    pair = next(pair for pair in plan.pairs if pair.row == f"{layer}out_proj")
    assert {"A_log", "D", "conv1d.weight", "dt_proj.weight"} <= {name.removeprefix(layer) for name in pair.sliced}
    assert not any(name.startswith(layer) for name in plan.fallbacks), "what is split is no fallback"


def test_sections_of_a_mixer_follow_from_the_data_flow() -> None:
    spec = planned("mamba2").linears["backbone.layers.0.mixer.in_proj"].weight
    assert [section.sharded for section in spec.sections] == [True, True, False, True], "z, x, B and C, dt"


def test_experts_are_split_inside_and_their_shared_bias_counts_once() -> None:
    plan = planned("gpt_oss")
    pair = next(pair for pair in plan.pairs if pair.row == "model.layers.0.mlp.experts")
    assert {name.rpartition(".")[2] for name in pair.sliced} == {"gate_up_proj", "gate_up_proj_bias", "down_proj"}
    assert [name.rpartition(".")[2] for name in pair.scaled] == ["down_proj_bias"]
    assert pair.row not in plan.fallbacks


def test_per_head_tensors_are_sliced() -> None:
    assert "model.layers.0.self_attn.sinks" in planned("gpt_oss").shard_specs()


class UnlikelyNorm(nn.Module):
    """Mixes all channels in a way no one has a formula for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (1.0 + x.abs().amax(-1, keepdim=True)) + x.mean(-1, keepdim=True)


class Mixer(nn.Module):
    """A block of nobody's architecture: a convolution per channel, an inner projection, a norm over all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 20
        self.enter = nn.Linear(12, 2 * self.width)
        self.filter = nn.Conv1d(self.width, self.width, 3, padding=2, groups=self.width)
        self.select = nn.Linear(self.width, 6, bias=False)
        self.expand = nn.Linear(6, self.width)
        self.norm = UnlikelyNorm(self.width)
        self.leave = nn.Linear(self.width, 12)

    def forward(self, x: Tensor) -> Tensor:
        gate, inner = self.enter(x).split([self.width, self.width], -1)
        inner = self.filter(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        steps = F.softplus(self.expand(self.select(inner)))
        return self.leave(self.norm(inner * steps) * torch.sigmoid(gate))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_an_unknown_mixer_is_paired_and_exact(tp_size: int) -> None:
    torch.manual_seed(5)
    model, sample = Residual(Mixer()), {"x": torch.randn(3, 5, 12)}
    plan = plan_tensor_parallel(model, tp_size, sample)
    assert kinds(plan, "inner.") == {"enter": "column", "select": "reduce", "expand": "column", "leave": "row"}
    assert set(plan.pairs[0].norms) == {"inner.norm"}
    verify_model(model, plan, sample)


def test_an_override_decides_before_anything_is_derived() -> None:
    name = "model.layers.0.mlp.down_proj"
    plan = planned("llama", overrides={"*.mlp.*": "gather", name: "replicate"})
    assert plan.linears["model.layers.1.mlp.down_proj"].role == "gather"
    assert name not in plan.linears
    assert "tensor_parallel.plan says so" in plan.whole[name]
    assert kinds(plan, "model.layers.0.self_attn.") == dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column") | {
        "o_proj": "row"
    }
    assert len(planned("llama", overrides={"model.layers.*": "pair"}).pairs) == 10


@pytest.mark.parametrize(
    ("name", "tp_size", "overrides", "message"),
    [
        ("llama", 2, {"*.q_prj": "gather"}, r"plan\['\*\.q_prj'\] names none of the \d+ modules.*q_proj"),
        ("llama", 2, {"*": "columns"}, r"plan\['\*'\]='columns'.*pair, gather, replicate"),
        ("llama", 65, {}, r"tp_size=65 is larger than 64"),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, tp_size: int, overrides: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(name, tp_size, overrides=overrides)


class RunningSum(nn.Module):
    """Each channel is the sum of those before it, which a part of the channels does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x).cumsum(-1))


def test_a_pair_that_is_wanted_and_would_be_wrong_is_refused() -> None:
    model, sample = Residual(RunningSum()), {"x": torch.randn(3, 5, 12)}
    with pytest.raises(PlanError, match=r"wants inner\.enter in a pair.*rejected"):
        plan_tensor_parallel(model, 2, sample, overrides={"inner.enter": "pair"})


def test_quantised_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    model[0].forward = lambda x: x * 2  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"0\.weight holds torch.uint8 values of shape \(8, 4\)"):
        plan_tensor_parallel(model, 2, {"input": torch.randn(2, 8, requires_grad=True)})


def test_more_ranks_than_heads_fall_back_to_gathers() -> None:
    plan = planned("llama", 8)
    assert set(kinds(plan, "model.layers.0.self_attn.").values()) == {"gather"}
    assert set(kinds(plan, "model.layers.0.mlp.").values()) == {"column", "row"}
