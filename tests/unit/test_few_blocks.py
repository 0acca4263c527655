"""A deep model is planned and checked on some of its blocks only where those are shown to do what all of them do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stage_models import VOCAB, build
from torch import Tensor, nn

from hf_parallel.engine.plan import self_check
from hf_parallel.engine.plan.shards import Shown
from hf_parallel.engine.plan.stages import Cut
from hf_parallel.errors import PlanError
from hf_parallel.model import fewer as fewer_module
from hf_parallel.model import unchanged as unchanged_module
from hf_parallel.model.fewer import Fewer, fewer_blocks, with_blocks
from hf_parallel.model.probes import Probes
from hf_parallel.model.samples import tiny_samples
from hf_parallel.model.tensors import largest
from hf_parallel.pipeline_parallel.plan import verify_stages
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind
from hf_parallel.pipeline_parallel.plan.costs import StageCosts
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.repeated import Repetition, repeated, restricted


DEPTH = 16
LAYERS = {"num_hidden_layers": DEPTH}
DEEP: dict[str, dict[str, Any]] = {
    "llama": LAYERS,
    "llama_tied": LAYERS,
    "qwen3": LAYERS | {"layer_types": ["full_attention"] * DEPTH},
    "gpt2_tied": {"n_layer": DEPTH},
    "bloom": {"n_layer": DEPTH},
}


def deep(name: str = "llama") -> nn.Module:
    return build(name, **DEEP[name])


def samples() -> list[dict[str, Any]]:
    return list(tiny_samples(VOCAB, use_cache=False))


def found(model: nn.Module, **options: Any) -> Fewer | None:
    sample = samples()[0]
    plan = discover_stages(model, sample, try_fewer=False)
    return fewer_blocks(model, plan.record, sample, is_on_meta=plan.discovered_on == "meta", **options)


def blocks(model: nn.Module, **options: Any) -> tuple[int, ...] | None:
    fewer = found(model, **options)
    return None if fewer is None else fewer.kept.blocks


FIRST = ("llama_tied", "gpt2_tied")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.long) for name in DEEP]
)
def test_equal_blocks_are_shown_by_three_and_plans_are_the_same(name: str) -> None:
    model = deep(name)
    probes = Probes(model, torch.device("cpu"))
    quick = discover_stages(model, probes.discovery, cost_tokens=probes.cost_tokens)
    slow = discover_stages(model, probes.discovery, cost_tokens=probes.cost_tokens, try_fewer=False)
    assert quick.kept is not None
    assert len(quick.kept.blocks) <= 4
    assert quick.kept.blocks[0] == 0
    assert quick.kept.blocks[-1] == DEPTH - 1
    assert slow.kept is None
    assert quick.fingerprint() == slow.fingerprint()
    assert (quick.flops, quick.num_tokens, quick.inputs.covered) == (slow.flops, slow.num_tokens, slow.inputs.covered)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_tied", "qwen3", "bloom"])
def test_a_plan_of_shards_from_few_blocks_is_that_of_all(name: str) -> None:
    model = deep(name)
    fewer = found(model)
    assert fewer is not None
    kept = fewer.kept
    few = plan_model(fewer.model, 2, samples()[0])
    whole = plan_model(model, 2, samples()[0])
    assert repeated(few, Repetition((kept.stack,), kept.shown_by), model).fingerprint() == whole.fingerprint()
    assert restricted(whole, kept.stack, kept.blocks, fewer.model).fingerprint() == few.fingerprint()


def test_few_blocks_are_those_of_the_whole_model() -> None:
    model = deep()
    small = with_blocks(model, "model.layers", [0, 5, 15])
    names = {
        name.replace("layers.1.", "layers.5.").replace("layers.2.", "layers.15."): p
        for name, p in small.named_parameters()
    }
    own = dict(model.named_parameters())
    assert all(own[name] is parameter for name, parameter in names.items())
    assert len(model.get_submodule("model.layers")) == DEPTH  # type: ignore[arg-type]
    assert (small.config.num_hidden_layers, model.config.num_hidden_layers) == (3, DEPTH)


def freeze(model: Any) -> None:
    model.model.layers[5].requires_grad_(False)


def scale(model: Any) -> None:
    model.model.layers[5].self_attn.scaling *= 2


def switch(model: Any) -> None:
    model.model.layers[5].mlp.mode = "other"


def widen(model: Any) -> None:
    model.model.layers[5].mlp.gate_proj = nn.Linear(32, 48)


def tie(model: Any) -> None:
    model.model.layers[5].mlp.gate_proj.weight = model.model.layers[7].mlp.gate_proj.weight


@pytest.mark.parametrize("change", [freeze, scale, switch, widen])
def test_a_block_that_differs_is_kept(change: Callable[[nn.Module], None]) -> None:
    model = deep()
    change(model)
    kept = blocks(model)
    assert kept is not None
    assert 5 in kept
    assert 1 in kept


def hook(model: Any) -> None:
    model.model.layers[5].register_forward_hook(lambda *_: None)


def patch(model: Any) -> None:
    genuine = model.model.layers[5].mlp.forward
    model.model.layers[5].mlp.forward = lambda x: genuine(x)


def patch_model(model: Any) -> None:
    genuine = model.forward
    model.forward = lambda **inputs: genuine(**inputs)


def own_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, **_: logits.sum()


def own_class(model: Any) -> None:
    class Mine(type(model.model.norm)):  # type: ignore[misc]
        pass

    model.model.norm.__class__ = Mine


@pytest.mark.parametrize("change", [hook, patch, patch_model, own_loss, own_class, tie])
def test_what_nobody_can_compare_is_tried_whole(change: Callable[[nn.Module], None]) -> None:
    model = deep()
    change(model)
    assert blocks(model) is None


def test_a_patched_class_is_tried_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = deep()
    kind = type(model.model.layers[0].mlp)
    genuine = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: genuine(self, x))
    assert blocks(model) is None


class Counting(nn.Module):
    """Blocks whose effect depends on how many ran before, on a value, or on what their index is."""

    def __init__(self, *, odd: int = -1, peeks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))
        self.head = nn.Linear(8, VOCAB)
        self.odd, self.peeks = odd, peeks

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden) * (0.5 if index == self.odd else 1.5)
            if self.peeks and hidden.sum() > 1e9:
                hidden = hidden * 2
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_what_a_library_does_differently_for_one_block_is_seen_in_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(Counting()) is None
    library = __name__.partition(".")[0]
    monkeypatch.setattr(fewer_module, "STOCK", (*fewer_module.STOCK, library))
    monkeypatch.setattr(unchanged_module, "LIBRARIES", {*unchanged_module.LIBRARIES, library})
    assert blocks(Counting()) == (0, 1, 15)
    assert blocks(Counting(odd=7)) is None  # 7 runs otherwise than its place among fewer blocks
    assert blocks(Counting(peeks=True)) is None


def test_a_shallow_model_is_tried_whole() -> None:
    assert blocks(build("llama")) is None


def checked(model: nn.Module, monkeypatch: pytest.MonkeyPatch, bounds: list[int]) -> list[int]:
    """Numbers of blocks of the models that the self-check of a cut compared."""
    depths: list[int] = []
    stock = verify_stages.check_split

    def check(model: Any, *rest: Any) -> None:
        depths.append(len(model.model.layers))
        stock(model, *rest)

    monkeypatch.setattr(self_check, "check_split", check)
    probes = Probes(model, torch.device("cpu"))
    stages = discover_stages(model, probes.discovery)
    ranks = [(index,) for index in range(len(bounds) - 1)]
    schedule: Any = SimpleNamespace(stages_of_ranks=ranks)
    cut = Cut(stages, schedule, StageCosts(()), bounds, "sum_over_items", BackwardKind())
    try:
        self_check._check_cut(model, cut, "on", probes)
    except PlanError:
        depths.append(-1)
    return depths


@pytest.mark.parametrize("bounds", [[0, 8, 16], [0, 1, 15, 16], [0, 9, 16, 16]])
def test_a_cut_is_checked_on_few_blocks(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (depth,) = checked(deep("llama_tied"), monkeypatch, bounds)
    assert depth <= 5


def test_a_fault_that_few_blocks_show_is_told_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = verify_stages._as_received
    monkeypatch.setattr(verify_stages, "_as_received", lambda tensor: stock(tensor * 1.01))
    assert checked(deep(), monkeypatch, [0, 8, 16]) == [5, 16, -1]


def test_few_blocks_that_fail_alone_do_not_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = verify_stages._compare_losses

    def compare(name: str, expected: Tensor, got: Tensor) -> None:
        if compare.fails:  # type: ignore[attr-defined]
            compare.fails = False  # type: ignore[attr-defined]
            raise PlanError("an overflow")
        genuine(name, expected, got)

    compare.fails = True  # type: ignore[attr-defined]
    monkeypatch.setattr(verify_stages, "_compare_losses", compare)
    assert checked(deep(), monkeypatch, [0, 8, 16]) == [5, 16]


def test_a_plan_that_is_wrong_in_a_block_that_is_left_out_is_seen() -> None:
    model = deep()
    fewer = found(model)
    assert fewer is not None
    plan = plan_model(model, 2, samples()[0])
    assert self_check._fewer_to_shard(model, plan, fewer.kept) is not None
    wrong = copy.deepcopy(plan)
    del wrong.linears["model.layers.7.mlp.gate_proj"]
    assert self_check._fewer_to_shard(model, wrong, fewer.kept) is None
    with pytest.raises((PlanError, KeyError, RuntimeError)):
        self_check._check_plan(model, wrong, Shown(kept=fewer.kept), "on", samples()[0])


class Writing(Counting):
    def forward(self, input_ids: Tensor, labels: Tensor, **rest: Any) -> Any:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return super().forward(input_ids, labels, **rest)


def is_shared(model: nn.Module) -> bool:
    plan = discover_stages(model, samples()[0])
    own, copied = dict(model.named_parameters()), verify_stages._pristine(model, plan)
    assert all(p is not own[name] and p.grad is None for name, p in copied.named_parameters())
    assert verify_stages.shares_parameters(model, plan) == (
        not plan.writes_parameters and fewer_module.is_stock(model)
    )
    (shared,) = {p.data_ptr() == own[name].data_ptr() for name, p in copied.named_parameters()}
    return shared


def test_only_weights_that_no_forward_writes_to_are_compared_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep("llama_tied")
    assert is_shared(model)
    hook(model)
    assert not is_shared(model)
    library = __name__.partition(".")[0]
    monkeypatch.setattr(fewer_module, "STOCK", (*fewer_module.STOCK, library))
    monkeypatch.setattr(unchanged_module, "LIBRARIES", {*unchanged_module.LIBRARIES, library})
    assert is_shared(Counting())
    assert not is_shared(Writing())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_largest_magnitude(dtype: torch.dtype) -> None:
    assert largest(torch.tensor([1.0, -3.0, 2.0], dtype=dtype)) == 3.0
    assert math.isnan(largest(torch.tensor([1.0, float("nan"), 2.0], dtype=dtype)))
    assert largest(torch.tensor([1.0, -float("inf")], dtype=dtype)) == float("inf")
