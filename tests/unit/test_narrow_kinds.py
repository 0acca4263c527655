"""Models of states, of layers with widths of their own, and of one block start on narrow copies, as others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_calls import MadeTensors
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
)

from hf_parallel.engine.plan import self_check
from hf_parallel.engine.plan import shards as plan_shards
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.stages import Cut
from hf_parallel.model import narrow as narrow_module
from hf_parallel.model.fewer import config_with_blocks
from hf_parallel.model.probes import Probes
from hf_parallel.model.samples import tiny_samples
from hf_parallel.model.widths import narrow_configs
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind
from hf_parallel.pipeline_parallel.plan.costs import StageCosts
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.sections import PipelineConfig
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.plan_for import Blueprint, narrow_blueprint, skeleton
from hf_parallel.tensor_parallel.plan.widened import widened


IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 1024}
WIDE: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, **IDS}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
# A projection of a layer of states gives a number for each head beside the channels of all heads.
SCAN: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
TYPES: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
GEMMA: dict[str, Any] = {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 0, "sliding_window": 8}
KINDS: dict[str, Any] = {
    "mamba": lambda: MambaConfig(**WIDE, state_size=8),
    "mamba2": lambda: Mamba2Config(**WIDE, num_heads=16, head_dim=32, state_size=64, n_groups=2, chunk_size=8),
    "bamba": lambda: BambaConfig(**WIDE, **HEADS, **SCAN, attn_layer_indices=[1]),
    "granite": lambda: GraniteMoeHybridConfig(
        **WIDE, **HEADS, **SCAN, **TYPES, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=256
    ),
    "nemotron": lambda: NemotronHConfig(
        **{name: value for name, value in WIDE.items() if name != "num_hidden_layers"}, **HEADS, head_dim=32,
        layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=16, mamba_head_dim=32, ssm_state_size=64, n_groups=2, chunk_size=8,
    ),
    "gemma4": lambda: Gemma4TextConfig(**WIDE, **HEADS, **GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "gemma4_embedded": lambda: Gemma4TextConfig(
        **WIDE, **HEADS, **GEMMA | {"hidden_size_per_layer_input": 32}, vocab_size_per_layer_input=1024,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "one_block": lambda: LlamaConfig(**WIDE | HEADS | {"num_hidden_layers": 1}),
}  # fmt: skip
PER_HEAD = ("mamba2", "bamba", "granite", "nemotron")


def long_but(*chosen: str, without: str = "") -> list[Any]:
    """The kinds, of which only the chosen ones are tried in every run."""
    kinds = [kind for kind in KINDS if kind != without]
    return [pytest.param(kind, marks=() if kind in chosen else pytest.mark.long) for kind in kinds]


@pytest.fixture(autouse=True)
def _narrows_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_module, "SMALL", 0)


def wide(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(KINDS[kind]())
    return model.train()


def sample() -> dict[str, Any]:
    return tiny_samples(1024, use_cache=False)[0]


def width(model: nn.Module) -> int:
    return max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", long_but("mamba2", "gemma4", "one_block"))
def test_a_tensor_parallel_start_makes_no_tensor_of_the_real_width(kind: str) -> None:
    model = wide(kind)
    with MadeTensors() as made:
        plan, narrow = plan_shards._made_small(Forms(model, sample(), parts=2), 2, {}, has_values=True)
        assert plan is not None
        assert narrow is not None
        assert self_check._check_plan(model, plan, plan_shards.Shown(None, narrow), "on", sample())
    assert made.elements < width(model) / 4


@pytest.mark.parametrize("kind", long_but("nemotron", "gemma4_embedded", without="one_block"))
def test_a_start_in_stages_makes_no_tensor_of_the_real_width(kind: str) -> None:
    model = wide(kind)
    probes = Probes(model, torch.device("cpu"))
    with MadeTensors() as made:
        plan = discover_stages(model, probes.batch)
        costs, schedule = StageCosts((1.0, 1.0), 0.0), ScheduleChoice(PipelineConfig(), 2)
        assert self_check._check_cut(
            model, Cut(plan, schedule, costs, [0, 1, 2], "mean", BackwardKind()), "on", probes
        )
    assert made.elements < width(model) / 4


@pytest.mark.parametrize("kind", long_but("mamba2"))
def test_the_plan_of_a_narrow_model_is_that_of_the_wide_one(kind: str) -> None:
    model = wide(kind)
    shown = Forms(model, sample(), parts=2).narrow
    assert shown is not None
    found = plan_model(shown.model, 2, shown.batch(sample()))
    made, expected = widened(found, shown.model, model), plan_model(model, 2, sample())
    expected.flops.update(made.flops)
    assert made.to_json() == expected.to_json()


@pytest.mark.parametrize("kind", long_but("bamba", "mamba"))
def test_a_model_that_is_not_read_yet_has_a_narrow_one(kind: str) -> None:
    blueprint = Blueprint(KINDS[kind](), AutoModelForCausalLM.from_config)
    found = narrow_blueprint(blueprint, sample(), 2)
    assert found is not None
    assert width(skeleton(found)) < width(skeleton(blueprint)) / 4


@pytest.mark.parametrize("kind", PER_HEAD)
def test_ranks_share_the_heads_of_states_of_a_narrow_model_as_those_of_the_wide_one(kind: str) -> None:
    """Heads that ranks cannot share may be cut at numbers that are no multiples of the narrow ones."""
    for parts in (2, 4):
        for config in narrow_configs(KINDS[kind](), parts=parts):
            heads = [getattr(config, name, 0) for name in ("mamba_n_heads", "mamba_num_heads", "num_heads")]
            assert max(heads) % parts == 0
            assert max(heads) > 2  # the groups that share a state
    names = [name for name in ("mamba_n_heads", "mamba_num_heads", "num_heads") if hasattr(KINDS[kind](), name)]
    by_heads = [c for c in narrow_configs(KINDS[kind](), parts=3) if getattr(c, names[0]) < 16]
    assert by_heads == []


def test_layers_keep_their_own_widths_in_fewer_blocks() -> None:
    types = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**WIDE | {"num_hidden_layers": 24}, **HEADS, **GEMMA, layer_types=types * 12)
    fewer = config_with_blocks(config, 24, (0, 1, 23))
    assert [fewer.per_layer_config[layer].head_dim for layer in range(3)] == [32, 64, 64]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    forms = Forms(model, sample(), parts=2)
    assert forms.kept is not None
    assert forms.kept.blocks == (0, 1, 2, 22, 23)  # the last of each kind keep their keys
    assert forms.narrow is not None
    small: Any = forms.narrow.model
    heads = [layer.self_attn.head_dim for layer in small.model.layers]
    assert heads == [8, 16, 8, 8, 16]


def test_the_width_of_every_layer_is_divided_without_a_rest() -> None:
    """Also that of layers that have the model's own, behind one that has another."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    heads = GEMMA | {"head_dim": 24}  # a fourth would be less than a head has
    config = Gemma4TextConfig(**WIDE | {"num_hidden_layers": 3}, **HEADS, **heads, layer_types=types)
    made = list(narrow_configs(config))
    assert [[one.per_layer_config[layer].head_dim for layer in range(3)] for one in made] == [[32, 12, 32]]


def other_head(model: Any) -> None:
    model.backbone.layers[1].mixer.head_dim = 16


def other_state(model: Any) -> None:
    model.backbone.layers[1].mixer.A_log = nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("change", [other_head, other_state])
def test_a_model_of_states_that_its_config_does_not_describe_is_tried_as_it_is(change: Any) -> None:
    model = wide("mamba2")
    assert Forms(model, sample()).narrow is not None
    change(model)
    assert Forms(model, sample()).narrow is None
