"""A narrow model stands for a wide one only where it is shown that it runs alike, and then gives the same plans."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_calls import sizes_of_calls
from peft import LoraConfig, get_peft_model
from thinning import in_turns
from torch import nn
from tp_models import CASES, LLAMA
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen3Config,
)

from hf_parallel.engine import weights
from hf_parallel.engine.plan import head as plan_head
from hf_parallel.engine.plan import plans, self_check
from hf_parallel.engine.plan import shards as plan_shards
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.stages import Cut
from hf_parallel.errors import PlanError
from hf_parallel.model import narrow as narrow_module
from hf_parallel.model.meta import off_meta
from hf_parallel.model.narrow import narrow_model
from hf_parallel.model.probes import Probes
from hf_parallel.model.samples import tiny_samples
from hf_parallel.model.stack import candidate_stacks
from hf_parallel.model.widths import narrow_configs
from hf_parallel.pipeline_parallel.plan import verify_stages
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind
from hf_parallel.pipeline_parallel.plan.costs import StageCosts
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.loss_kind import judge_loss
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.sections import PipelineConfig
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.plan_for import Blueprint, plan_for, skeleton
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.plan.widened import widened
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 1024}
KINDS: dict[str, Any] = {
    "llama": LlamaConfig(**LLAMA | WIDE),
    "llama_tied": LlamaConfig(**LLAMA | WIDE | CASES["llama_tied"]),
    "llama_kv1": LlamaConfig(**LLAMA | WIDE | CASES["llama_kv1"]),
    "llama_bias": LlamaConfig(**LLAMA | WIDE | {"attention_bias": True, "mlp_bias": True}),
    "smollm2": LlamaConfig(
        **LLAMA | WIDE | {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    ),
    "gpt2": GPT2Config(vocab_size=1024, n_embd=128, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2),
    "qwen3": Qwen3Config(**LLAMA | WIDE | {"head_dim": 32}),
    "phi3": Phi3Config(**LLAMA | WIDE),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _narrows_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_module, "SMALL", 0)


def wide(kind: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(KINDS[kind], attn_implementation=attention)
    return model.eval()


def sample() -> dict[str, Any]:
    return tiny_samples(1024, use_cache=False)[0]


def narrowed(model: nn.Module, **options: Any) -> narrow_module.Narrow | None:
    return narrow_model(model, candidate_stacks(model)[0], sample(), **options)


@pytest.mark.parametrize(("kind", "attention"), [*in_turns(list(KINDS), ["sdpa"], step=2), ("gpt2", "eager")])
def test_the_plan_of_a_narrow_model_is_that_of_the_wide_one(kind: str, attention: str) -> None:
    model = wide(kind, attention)
    for sequence in (False, True):
        small = narrowed(model, parts=2)
        assert small is not None
        assert sum(p.numel() for p in small.model.parameters()) < sum(p.numel() for p in model.parameters()) / 2
        found = plan_model(small.model, 2, small.batch(sample()), sequence=sequence)
        made, expected = widened(found, small.model, model), plan_model(model, 2, sample(), sequence=sequence)
        assert made.flops == pytest.approx(expected.flops)
        expected.flops.update(made.flops)
        assert made.to_json() == expected.to_json()


def odd(kind: str, width: int = 256) -> nn.Module:
    """A model whose widths three ranks do not divide; parts of the feed-forward one are aligned where it is long."""
    torch.manual_seed(0)
    config = copy.deepcopy(KINDS[kind])
    config.intermediate_size = width
    made: nn.Module = AutoModelForCausalLM.from_config(config)
    return made.eval()


@pytest.mark.parametrize(
    ("kind", "width"),
    [*((kind, 256) for kind in ("llama", "llama_kv1", "smollm2", "gpt2", "phi3")), ("llama", 2048), ("phi3", 2048)],
)
def test_a_narrow_plan_whose_parts_are_not_even_computes_the_same_in_the_wide_model(kind: str, width: int) -> None:
    model = odd(kind, width)
    small = narrowed(model, parts=3)
    assert small is not None
    verify_model(model, widened(plan_model(small.model, 3, small.batch(sample())), small.model, model), sample())


def test_a_width_that_blocks_read_and_single_elements_divide_is_planned_as_it_is() -> None:
    """Parts of 64 are 22, 22 and 20; those of 256 are 86, 86 and 84, and not 88."""
    model = odd("llama")
    small = narrowed(model, parts=3)
    assert small is not None
    found = plan_model(small.model, 3, small.batch(sample()))
    pair = next(one for one in found.pairs if "mlp" in one.row)
    linear = found.linears[pair.row]
    (section,) = linear.weight.sections
    by_ones = replace(linear, weight=replace(linear.weight, sections=(replace(section, unit=1),)))
    read = AttributeRewrite(pair.root, "intermediate_size", tuple(section.split(3)))
    changed = replace(found, linears=found.linears | {pair.row: by_ones}, pairs=(replace(pair, rewrites=(read,)),))
    with pytest.raises(PlanError, match=f"{pair.row}: parts of its width are no multiples"):
        widened(changed, small.model, model)


LATENT: dict[str, Any] = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
ODD: dict[str, Any] = {
    # Parts of a head that are cut apart by number, and a width of rotated channels that only some divisors leave even.
    "latent": DeepseekV3Config(
        **LLAMA | WIDE | LATENT | {"num_key_value_heads": 4}, v_head_dim=32, moe_intermediate_size=64, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1,
    ),
    "rotary": GPTNeoXConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.375},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_numbers_that_follow_from_widths_are_divided_with_them(kind: str) -> None:
    """Else the largest models would be planned and checked at their real widths."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(ODD[kind]).eval()
    small = narrowed(model, parts=2)
    assert small is not None
    assert sum(p.numel() for p in small.model.parameters()) < sum(p.numel() for p in model.parameters()) / 2
    found = plan_model(small.model, 2, small.batch(sample()))
    made, expected = widened(found, small.model, model), plan_model(model, 2, sample())
    expected.flops.update(made.flops)
    assert made.to_json() == expected.to_json()


ADAPTERS: dict[str, dict[str, Any]] = {
    "qv": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 4}},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 3, "init_lora_weights": "pissa"},
}


def adapted(kind: str, adapter: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = get_peft_model(wide(kind), LoraConfig(r=8, task_type="CAUSAL_LM", **ADAPTERS[adapter]))
    return made.train()


@pytest.mark.parametrize(("kind", "adapter"), [("llama", "qv"), ("qwen3", "all"), ("smollm2", "rslora")])
def test_a_narrow_model_has_the_adapters_of_the_wide_one(kind: str, adapter: str) -> None:
    model = adapted(kind, adapter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    small = narrowed(model, parts=2)
    assert small is not None
    mine = dict(small.model.named_parameters())
    assert {name: p.requires_grad for name, p in mine.items()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    assert all(p.count_nonzero() for name, p in mine.items() if "lora_" in name)  # else products with B show nothing
    found = plan_model(small.model, 2, small.batch(sample()))
    made, expected = widened(found, small.model, model), plan_model(model, 2, sample())
    expected.flops.update(made.flops)
    assert made.to_json() == expected.to_json()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_chosen_adapter_is_chosen_in_the_narrow_model_too() -> None:
    model: Any = adapted("llama", "qv")
    model.add_adapter("second", LoraConfig(r=4, target_modules=["o_proj"]))
    for chosen in ("default", "second"):
        model.set_adapter(chosen)
        small: Any = narrowed(model)
        assert small is not None
        assert small.model.active_adapter == chosen
    with model.disable_adapter():
        assert narrowed(model) is None


def quantised(folder: Path, blocks: int, **how: Any) -> nn.Module:
    """Adapters on a wide base in 4 or 8 bit."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA | WIDE | {"num_hidden_layers": blocks})).save_pretrained(folder)
    given = BitsAndBytesConfig(bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **how)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=given, dtype=torch.float32)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made: nn.Module = get_peft_model(base, adapters).train()
    return made


@pytest.mark.parametrize("nested", [False, True])
def test_a_narrow_model_is_quantised_as_the_wide_one(nested: bool, tmp_path: Path) -> None:
    """In 4 bit, too, nothing of the real widths is computed at a start."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = quantised(tmp_path, 2, load_in_4bit=True, bnb_4bit_use_double_quant=nested)
    forms = Forms(model, sample())
    assert forms.narrow is not None
    pairs = list(zip(forms.narrow.model.named_modules(), model.named_modules(), strict=True))
    assert [type(mine) for (_, mine), _ in pairs] == [type(other) for _, (_, other) in pairs]
    layers = [(mine, other) for (_, mine), (_, other) in pairs if isinstance(mine, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 14
    mine: Any
    for mine, other in layers:
        state, real = mine.weight.quant_state, other.weight.quant_state
        assert mine.weight.numel() * 4 <= other.weight.numel()
        assert (state.quant_type, state.nested, state.dtype) == (real.quant_type, real.nested, real.dtype)
        assert (mine.compute_dtype, mine.weight.device) == (other.compute_dtype, other.weight.device)
    small = forms.narrow.model(**forms.narrow.batch(sample()))
    small.loss.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in forms.narrow.model.parameters() if p.requires_grad)
    assert judge_loss(forms.narrow.model, forms.narrow.batch(sample())) == judge_loss(model, sample())


@pytest.mark.parametrize("bits", [4, 8])
def test_few_blocks_stand_for_a_deep_quantised_model(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = quantised(tmp_path, 12, load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    kept = Forms(model, sample()).kept
    assert kept is not None
    assert kept.blocks == (0, 1, 11)
    model.base_model.model.model.layers[5].mlp.up_proj.forward = lambda hidden: hidden  # code of a user
    assert Forms(model, sample()).kept is None


def test_adapters_of_some_blocks_have_these_in_what_stands_for_the_model() -> None:
    config = LlamaConfig(**LLAMA | WIDE | {"num_hidden_layers": 12})
    adapters = LoraConfig(r=8, target_modules=["q_proj"], layers_to_transform=[5, 11], task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(AutoModelForCausalLM.from_config(config), adapters).train()
    forms = Forms(model, sample())
    assert forms.kept is None or 5 in forms.kept.blocks
    assert forms.kept is None or forms.narrow is None
    plain = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules=["q_proj"]))
    few = Forms(plain.train(), sample())
    assert few.kept is not None
    assert few.kept.blocks == (0, 1, 11)
    assert few.narrow is not None


def test_a_narrow_model_does_not_warn_of_adapters_of_the_wide_one() -> None:
    config = LlamaConfig(**LLAMA | WIDE | {"num_hidden_layers": 12})
    adapters = LoraConfig(target_modules=["q_proj"], alpha_pattern={"layers.7.self_attn.q_proj": 32}, lora_bias=True)
    forms = Forms(get_peft_model(AutoModelForCausalLM.from_config(config), adapters).train(), sample())
    assert forms.kept is not None
    assert len(forms.kept.blocks) <= 7  # in the model with few blocks no block has the number that the pattern names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forms.narrow is not None


@pytest.mark.parametrize("kind", ["llama_tied", "smollm2", "gpt2", "phi3"])
def test_a_model_without_values_is_planned_by_a_narrow_one(kind: str) -> None:
    blueprint = Blueprint(KINDS[kind], AutoModelForCausalLM.from_config)
    unread = skeleton(blueprint)
    with off_meta(unread, torch.device("cpu")):
        forms = Forms(unread, Probes(unread, torch.device("cpu"), sample()).batch, parts=2)
        made, narrow = plan_shards._made_small(forms, 2, {}, has_values=False)
    assert made is not None
    assert narrow is not None
    sizes = [sum(p.numel() for p in model.parameters()) for model in (narrow.shown.model, unread)]
    assert sizes[0] < sizes[1] / 2
    expected = plan_for(KINDS[kind], 2, sample=sample())
    expected.flops.update(made.flops)
    assert made.to_json() == expected.to_json()
    small, batch = weights._stand_in(blueprint).model(sample())
    assert judge_loss(small, batch) == judge_loss(wide(kind), sample())


@pytest.mark.parametrize("spread", [0.0, 1e-6])
def test_what_stands_for_unread_weights_computes_something_in_every_block(spread: float) -> None:
    """A config may name any spread; of blocks that add next to nothing no trial shows what is wrong."""
    config = LlamaConfig(**LLAMA | WIDE | {"initializer_range": spread})
    with torch.device("meta"):
        blueprint = weights.blueprint_of(AutoModelForCausalLM.from_config(config).train())
    small, _ = weights._stand_in(blueprint).model(sample())
    faint = [
        n for n, p in small.named_parameters() if p.ndim > 1 and float(p.detach().std()) < narrow_module.FAINT / 2
    ]
    assert faint == []


LAYOUTS: dict[str, dict[str, Any]] = {"pp": {"pp_size": 2}, "tp": {"tp_size": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("self_check", ["auto", "full"])
def test_the_loss_without_logits_is_tried_on_a_narrow_model(
    layout: str, self_check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head in fp32 and two of its gradients would be gigabytes of a large vocabulary."""
    model, pp_size = wide("llama_tied"), LAYOUTS[layout].get("pp_size", 1)
    sections = {"pipeline": {"self_check": self_check}, "tensor_parallel": {"self_check": self_check}}
    setup: Any = SimpleNamespace(
        model=model,
        config=HFParallelConfig.from_mapping(LAYOUTS[layout] | sections),
        mesh=SimpleNamespace(shape=SimpleNamespace(tp_size=LAYOUTS[layout].get("tp_size", 1))),
        verdicts=SimpleNamespace(get=lambda *_: None, put=lambda *_: None),
        watchdog=SimpleNamespace(runs=lambda _: None, waiting=None),
    )
    probes = Probes(model, torch.device("cpu"))
    tries_fewer = self_check != "full"
    found = discover_stages(model, probes.discovery, try_fewer=tries_fewer) if pp_size > 1 else None
    monkeypatch.setattr(plan_head, "on_rank_zero", lambda look, _, waiting: look())
    monkeypatch.setattr(plan_head, "judge_head", plan_head.judge_head)  # put back at the end
    sizes = sizes_of_calls(plan_head, "judge_head")
    assert plan_head.plan_head(setup, plans._forms(setup, probes, found), None, None).is_deferred
    whole = sum(p.numel() for p in model.parameters())
    assert len(sizes) == 1
    assert sizes[0] < whole / 8 if tries_fewer else sizes[0] == whole


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_a_cut_is_checked_on_a_narrow_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide(kind)
    probes = Probes(model, torch.device("cpu"))
    plan = discover_stages(model, probes.batch)
    cut = Cut(
        plan, ScheduleChoice(PipelineConfig(), 2), StageCosts((1.0, 1.0), 0.0), [0, 1, 2], "mean", BackwardKind()
    )
    checked: list[int] = []
    real = self_check.check_split

    def counted(model: nn.Module, *rest: Any) -> None:
        checked.append(sum(p.numel() for p in model.parameters()))
        real(model, *rest)

    monkeypatch.setattr(self_check, "check_split", counted)
    whole = sum(p.numel() for p in model.parameters())
    self_check._check_cut(model, cut, "auto", probes)
    assert len(checked) == 1
    assert checked[0] < whole / 2
    self_check._check_cut(model, cut, "full", probes)
    assert checked[1:] == [whole]
    # What a cut would lose shows on the narrow model, too, and the wide one has the last word.
    monkeypatch.setattr(verify_stages, "_as_received", lambda tensor: tensor.detach().mul(1.01).requires_grad_())
    with pytest.raises(PlanError, match="cannot pipeline"):
        self_check._check_cut(model, cut, "auto", probes)
    assert checked[2] < checked[3] == whole


def test_sizes_keep_whether_ranks_can_share_them() -> None:
    made = next(
        narrow_configs(LlamaConfig(**LLAMA | WIDE | {"vocab_size": 3 * 1024, "intermediate_size": 192}), parts=3), None
    )
    assert made is not None
    assert (made.vocab_size % 3, made.intermediate_size % 3) == (0, 0)
    assert made.vocab_size < 3 * 1024
    named = next(narrow_configs(LlamaConfig(**LLAMA | WIDE | {"eos_token_id": [2, 700]})), None)
    assert named is not None
    assert named.vocab_size > 700
    assert not list(narrow_configs(LlamaConfig(**LLAMA)))  # heads of 8 channels


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)


def hooked_by_partial(model: Any) -> None:
    model.model.layers[0].register_forward_hook(functools.partial(lambda own, module, args, output: None, 1))


def hooked_by_object(model: Any) -> None:
    class Hook:
        def __call__(self, *args: Any) -> None: ...

    model.model.layers[0].register_full_backward_hook(Hook())


def patched(model: Any) -> None:
    model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)


def patched_below(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x)


def other_setting(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


def other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def own_setting(model: Any) -> None:
    model.temperature = 2.0


def other_class(model: Any) -> None:
    model.model.norm = nn.LayerNorm(128)


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def resized(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(128, 192, bias=True)


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        hooked_by_partial,
        hooked_by_object,
        patched,
        patched_below,
        other_setting,
        other_scale,
        own_setting,
        other_class,
        untied,
        resized,
    ],
)
def test_a_model_that_is_not_what_its_config_describes_is_tried_as_it_is(change: Any) -> None:
    model = wide("llama_tied")
    assert narrowed(model) is not None
    change(model)
    assert narrowed(model) is None


def test_state_is_that_of_the_wide_model() -> None:
    model = wide("llama_tied").to(torch.bfloat16)
    model.train()
    model.model.norm.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    before = torch.random.get_rng_state()
    small = narrowed(model)
    assert small is not None
    assert torch.equal(torch.random.get_rng_state(), before)
    there = dict(model.named_parameters())
    for name, parameter in small.model.named_parameters():
        assert (parameter.dtype, parameter.requires_grad) == (there[name].dtype, there[name].requires_grad)
    assert small.model.training


@pytest.mark.parametrize("spread", [0.0, 1e-5, 1e-3])
def test_blocks_of_the_narrow_model_compute_something_whatever_spread_the_config_names(spread: float) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**LLAMA | WIDE | {"initializer_range": spread}))
    small = narrowed(model)
    assert small is not None
    spreads = [float(p.detach().std()) for p in small.model.parameters() if p.ndim > 1]
    assert min(spreads) > 0.01
    assert max(spreads) < 0.1


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_blocks_that_run_again_do_so_in_the_narrow_model(kind: str) -> None:
    model: Any = wide(kind).train()
    model.gradient_checkpointing_enable()
    small = narrowed(model)
    assert small is not None
    ran: list[str] = []
    for name, module in small.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    ids = small.batch(sample())["input_ids"]
    small.model(input_ids=ids, labels=ids).loss.backward()
    assert [ran.count(name) for name in sorted(set(ran))] == [2, 2]
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    assert narrowed(model) is None  # the same from somebody else


def test_batches_that_are_not_text_alone_are_tried_as_they_are() -> None:
    model = wide("llama_tied")
    picture = sample() | {"pixel_values": torch.zeros(2, 3, 4, 4)}
    assert narrow_model(model, "model.layers", picture) is None
