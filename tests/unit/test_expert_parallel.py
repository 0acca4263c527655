"""Which experts are spread, what is refused, and what travels, in one process.

If these fail, a module that is no sum over experts is cut apart without a word, a weight changes on its way to another rank,
or a setting that has no effect is taken.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import zoo
from counted_calls import sizes_of_calls
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig, MixtralConfig, MixtralForCausalLM
from zoo.experts import difference, sweep_experts
from zoo.experts_page import HEADER, MARK, expert_lines, expert_totals
from zoo.parts import is_of_this_release, part_of

from hf_parallel.batches import empty_microbatch
from hf_parallel.engine.plan import experts as plan_experts_of_run
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.errors import ConfigError, PlanError
from hf_parallel.expert_parallel import exchange
from hf_parallel.expert_parallel.plan import find_kinds, plan_experts, refuse_without_experts
from hf_parallel.memory.estimate import estimate
from hf_parallel.memory.terms import Layout, ModelShape, Work
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model import narrow
from hf_parallel.model.samples import tiny_samples
from hf_parallel.settings.config import HFParallelConfig


PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 2}, r"ep_size=2 with tp_size=2 is not available: .*Set tp_size to 1"),
    ({"zero": {"stage": 2}}, r"ep_size=2 with zero\.stage=2 .*Set zero\.stage to 1"),
    ({"zero": {"stage": 3}}, r"ep_size=2 with zero\.stage=3 .*Set zero\.stage to 1"),
    ({"zero": {"stage": 1, "dp_shard_size": 2}}, r"ep_size=2 with zero\.dp_shard_size=2"),
    ({"zero": {"stage": 1, "overlap_gather": True}}, r"ep_size=2 with zero\.overlap_gather=true"),
    ({"gradient_compression": {"method": "int8"}}, r"ep_size=2 with gradient_compression\.method=int8"),
    ({"local_sgd": {"sync_every": 4}}, r"ep_size=2 with local_sgd\.sync_every=4"),
    ({"pp_size": 2, "pipeline": {"compile_blocks": "inductor"}}, r"ep_size=2 with pipeline\.compile_blocks=inductor"),
    ({"zero": {"stage": 1, "engine": "deepspeed"}}, r"ep_size=2 with zero\.engine=deepspeed has no effect"),
    ({"pp_size": 2, "pipeline": {"schedule": "pipedream_2bw"}}, r"ep_size=2 with pipeline\.schedule=pipedream_2bw"),
    ({"layout": "auto"}, r"ep_size=2 with layout=auto"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_what_does_not_go_with_experts_on_replicas_is_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HFParallelConfig(ep_size=2, **settings)


def test_ep_size_divides_the_replicas() -> None:
    config = HFParallelConfig(ep_size=2, pp_size=2)
    assert config.dp_size(8) == 4
    with pytest.raises(ConfigError, match=r"ep_size=2 with num_processes=6: .*the 3 replicas .*num_processes to 4"):
        config.dp_size(6)


def test_replicas_that_share_experts_are_neighbours_of_one_stage() -> None:
    shape = MeshShape(4, 2, 1, ep_size=2)
    assert [shape.holder(1, part) for part in range(2)] == [1, 3]
    assert (shape.mp_size, shape.copy_size, shape.parts_size) == (2, 4, 2)
    assert shape == MeshShape(4, 2, 1), "random states are those of the ranks, whatever they share"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_losses_and_gradients_are_those_of_one_process(kind: str, ranks: int) -> None:
    model = tiny.MODELS[kind]()
    samples = [{key: value[:2] for key, value in _batch(seed).items()} for seed in range(ranks)]
    samples[-1] = {key: value[:1, :3] for key, value in samples[-1].items()}  # few tokens, that miss most experts
    plan = plan_experts(model, find_kinds(model, ranks, samples[0]), ranks)
    assert plan.modules[0].routing.experts == 4
    assert difference(model, plan, samples) <= 1e-5


def _batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, tiny.VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


class Experts(nn.Module):
    """Experts of a toy model; `mixes` makes what a token gets depend on the others, always or in training."""

    def __init__(self, mixes: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)))
        self.num_experts, self.mixes = 4, mixes

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            made = hidden[token] @ self.up[expert] * weights[token, choice, None]
            out = out.index_add(0, token, made)
        if self.mixes == "draws" and self.training:
            return out * (1 + torch.rand(len(out), 1))
        mixes = self.mixes == "always" or (self.mixes == "training" and self.training)
        return out - out.mean(0, keepdim=True) if mixes else out


class Toy(nn.Module):
    def __init__(self, mixes: str = "never") -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(20, 8), nn.Linear(8, 4)
        self.experts = Experts(mixes)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids).reshape(-1, 8)
        weights, index = self.gate(hidden).softmax(-1).topk(2)
        return self.experts(hidden, index, weights)


def test_a_model_of_ones_own_is_spread_without_any_code_for_it() -> None:
    model, sample = Toy(), {"input_ids": torch.arange(12).view(2, 6)}
    plan = plan_experts(model, find_kinds(model, 2, sample), 2)
    assert [(one.root, sorted(one.sliced)) for one in plan.modules] == [("experts", ["up"])]
    assert plan.shard_specs()["experts.up"].local_size(2, 1) == 2


@pytest.mark.parametrize("moment", ["always", "training"])
def test_experts_whose_tokens_depend_on_each_other_are_refused_with_their_name(moment: str) -> None:
    sample = {"input_ids": torch.arange(12).view(2, 6)}
    with pytest.raises(PlanError, match=r"experts \(Experts\) does not compute the same on 2 ranks .*output differs"):
        find_kinds(Toy(moment), 2, sample)


def test_experts_that_draw_in_training_are_compared_in_evaluation() -> None:
    assert len(find_kinds(Toy("draws"), 2, {"input_ids": torch.arange(12).view(2, 6)})) == 1


def test_more_ranks_than_experts_are_refused() -> None:
    model, sample = Toy(), {"input_ids": torch.arange(12).view(2, 6)}
    with pytest.raises(PlanError, match=r"ep_size=8: experts has 4 experts, and each rank needs one"):
        plan_experts(model, find_kinds(model, 8, sample), 8)


def test_experts_that_all_rows_pass_are_refused_with_other_ways_to_divide_them() -> None:
    config = Llama4TextConfig(
        **{
            **tiny.SMALL,
            "intermediate_size": 16,
            "intermediate_size_mlp": 16,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "pad_token_id": 0,
        },
        **{"num_local_experts": 4, "moe_layers": [0, 1]},
    )
    says = r"experts \(Llama4TextExperts\) is not called with .* so it does not say which rows each expert gets .*tp_size the width"
    with pytest.raises(PlanError, match=says):
        plan_experts(Llama4ForCausalLM(config), [], 2)


def test_a_model_without_experts_is_refused_before_anything_runs() -> None:
    with pytest.raises(PlanError, match=r"ep_size=2: LlamaForCausalLM has no module that owns stacks of experts"):
        refuse_without_experts(tiny.MODELS["llama"](), 2)
    refuse_without_experts(tiny.MODELS["llama"](), 1)
    refuse_without_experts(tiny.MODELS["mixtral"](), 2)


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("values", [torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_what_rides_as_columns_of_hidden_states_arrives_bit_by_bit(rows: torch.dtype, values: torch.dtype) -> None:
    odd = float("nan") if values.itemsize >= rows.itemsize else 3.0  # a wider dtype has other bits for it
    given = torch.tensor([[1.5], [odd], [-0.0], [1e-30]]) if values.is_floating_point else None
    sent = torch.tensor([[0], [7], [2**31 - 1], [-1]]) if given is None else given
    sent = sent.to(values)
    columns = exchange._columns(sent, torch.zeros(4, 3, dtype=rows))
    assert columns.dtype == rows
    arrived = exchange._uncolumned(columns.clone(), values)
    assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8))


def test_an_empty_microbatch_adds_no_label() -> None:
    batch = {"input_ids": torch.ones(3, 4), "labels": torch.ones(3, 4, dtype=torch.long), "flag": True}
    empty = empty_microbatch(batch)
    assert empty["input_ids"].shape == (1, 4)
    assert empty["flag"] is True
    assert empty["labels"].tolist() == [[-100] * 4]


def test_memory_counts_the_experts_that_a_rank_keeps() -> None:
    shape = ModelShape(1200, 2, 8, 16, 10, 2, 2, 4, embedding=100, head=100, experts=400)
    one, two = (
        estimate(shape, Layout(4, 4, precision="fp32", stage=stage, ep_size=ep_size), Work(1, 8)).gpu
        for ep_size, stage in ((1, 0), (2, 0))
    )
    assert one["weights"] - two["weights"] == 4 * 400
    shared = [
        estimate(shape, Layout(4, 4, precision="fp32", stage=1, ep_size=ep), Work(1, 8)).gpu["optimizer state"]
        for ep in (1, 2, 4)
    ]
    assert shared == [pytest.approx(8 * 1200 / 4)] * 3, (
        "experts are on fewer replicas, of which each has a larger part"
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe", "nemotron_h"])
def test_types_of_the_zoo_are_exact_on_two_ranks(name: str) -> None:
    row = sweep_experts(name)
    assert (row.verdict, row.note) == ("exact", ""), row


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("longcat_flash", r"owns stacks of \d+ and \d+ matrices"),
        ("dbrx", ""),
    ],
)
def test_experts_that_are_not_one_matrix_each_are_not_spread(name: str, text: str) -> None:
    row = sweep_experts(name)
    assert row.verdict == ("refused" if text else "no experts")
    assert re.search(text, row.note)


def test_experts_that_take_something_else_are_refused_with_their_name() -> None:
    row = sweep_experts("jetmoe")
    assert row.verdict == "refused"
    assert "model.layers.0.mlp.input_linear (JetMoeParallelExperts) is not called with" in row.note


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", zoo.entries())
def test_every_entry_is_exact_or_says_why_not(name: str) -> None:
    row = sweep_experts(name)
    assert row.verdict != "failed", row
    assert row.verdict != "refused" or row.note


def test_a_gradient_of_the_wrong_experts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.MODELS["mixtral"]()
    samples = [_batch(0), _batch(1)]
    plan = plan_experts(model, find_kinds(model, 2, samples[0]), 2)
    genuine = exchange.Journey.back
    monkeypatch.setattr(exchange.Journey, "back", lambda self, rows: genuine(self, rows.flip(0)))
    assert difference(model, plan, samples) > 1e-3
    with pytest.raises(PlanError, match="does not compute the same on 2 ranks"):
        find_kinds(model, 2, samples[0])


@pytest.mark.skipif(not is_of_this_release(PAGE.read_text()), reason="the page is of another release of transformers")
def test_the_page_has_the_totals_of_its_rows() -> None:
    part = part_of(PAGE.read_text(), MARK)
    cells = [line.removeprefix("| ").split(" | ") for line in expert_lines(PAGE.read_text())]
    assert HEADER in part
    names, types = [row[0] for row in cells], zoo.all_types()
    assert names == [name for name in zoo.entries() if name in names]
    exact, refused = (sum(row[1] == verdict and row[0] in types for row in cells) for verdict in ("exact", "refused"))
    assert f"Types: {len(types)}. Exact: {exact}. Refused with a reason: {refused}." in part
    assert expert_totals([], [])[0].split()[0] == "Types:"
    assert {row[1] for row in cells} <= {"exact", "refused"}


def experts_found(model: Any, **forms: Any) -> tuple[list[int], list[str]]:
    """Elements of the models that were tried for experts, and the roots of the experts that are spread."""
    setup: Any = SimpleNamespace(
        model=model,
        mesh=SimpleNamespace(shape=SimpleNamespace(ep_size=2)),
        watchdog=SimpleNamespace(waiting=None),
    )
    sizes = sizes_of_calls(plan_experts_of_run, "find_kinds")
    made = Forms(model, tiny_samples(64, use_cache=False)[0], **forms)
    return sizes, [one.root for one in plan_experts_of_run.spread_over(setup, made, None).modules]


def test_experts_of_a_deep_wide_model_are_tried_on_few_narrow_blocks_and_the_whole_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(narrow, "SMALL", 0)
    monkeypatch.setattr(plan_experts_of_run, "on_rank_zero", lambda find, _, waiting: find())
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config).train()
    roots = [f"model.layers.{index}.mlp" for index in range(12)]
    whole, real = sum(p.numel() for p in model.parameters()), plan_experts_of_run.find_kinds
    monkeypatch.setattr(plan_experts_of_run, "find_kinds", real)  # put back at the end
    sizes, found = experts_found(model)
    assert len(sizes) == 1
    assert sizes[0] < whole / 10
    assert [root.removesuffix(".experts") for root in found] == roots

    def refused(tried: Any, *rest: Any) -> Any:
        if tried is not model:
            raise PlanError("of a smaller one")
        return real(tried, *rest)

    monkeypatch.setattr(plan_experts_of_run, "find_kinds", refused)
    sizes, again = experts_found(model)
    assert again == found
    assert sizes == sorted(sizes)
    assert (len(sizes), sizes[-1]) == (3, whole)
    monkeypatch.setattr(plan_experts_of_run, "find_kinds", real)
    assert experts_found(model, tries_fewer=False) == ([whole], found)
