"""Discovery on shapes alone finds the same plan as on data, and puts every tensor back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_models import CONFIGS, VOCAB, batch, build
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.model.meta import on_meta
from hf_parallel.model.samples import probe_samples
from hf_parallel.pipeline_parallel.plan.costs import block_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages


@pytest.mark.parametrize(
    ("name", "dtype", "experts"),
    [
        *((name, torch.float32, "") for name in CONFIGS),
        *(("mixtral", dtype, "grouped_mm") for dtype in (torch.bfloat16, torch.float32)),
    ],
)
def test_the_plan_is_the_same_on_meta_and_on_data(name: str, dtype: torch.dtype, experts: str) -> None:
    model = build(name).to(dtype)
    if experts:
        model.set_experts_implementation(experts)  # the only one of torch's that needs no values
    samples = probe_samples(model, VOCAB)
    plan, real = discover_stages(model, samples), discover_stages(model, samples, try_meta=False)
    assert (plan.discovered_on, real.discovered_on) == (
        "cpu" if name == "mixtral" and not experts else "meta",
        "cpu",
    )
    assert plan.fingerprint() == real.fingerprint()
    assert plan.zero_outputs == real.zero_outputs
    assert plan.inputs.covered == real.inputs.covered
    assert plan.num_tokens == real.num_tokens
    assert all(plan.joins(j) == real.joins(j) for j in range(plan.num_blocks))
    for boundary in range(1, plan.num_blocks + 1):
        assert plan.crossings(boundary) == real.crossings(boundary)


def objects_of(model: nn.Module) -> dict[str, Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        found |= {f"{prefix}!{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_the_very_same_tensors_are_back_afterwards_and_ties_hold_inside(fails: bool) -> None:
    model = build("llama_tied")
    model.model.scale = torch.ones(3)
    model.register_buffer("empty", None)
    before = objects_of(model)
    values = {name: tensor.clone() for name, tensor in before.items()}

    def inside() -> None:
        with on_meta(model):
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert {t.device.type for t in objects_of(model).values()} == {"meta"}
            assert model.lm_head.weight.requires_grad
            model.register_buffer("late", torch.zeros(2, device="meta"))
            model.model.scale = torch.zeros(3, device="meta")
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            inside()
    else:
        inside()
    after = objects_of(model)
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())


class Peeking(nn.Module):
    """Asks for a value in the middle of its forward."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCAB)
        self.order = order

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for index in self.order:
            hidden = self.blocks[index](hidden)
        logits = self.head(hidden) * (1 if labels.max().item() > 0 else 2)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_a_model_that_asks_for_values_is_discovered_on_its_own_device() -> None:
    inputs = {"input_ids": batch()["input_ids"], "labels": batch()["labels"]}
    plan = discover_stages(Peeking(), inputs, cost_tokens=(1, 64))
    assert plan.discovered_on == "cpu"
    assert plan.num_tokens == 16
    assert len(plan.crossings(1)) == 1
    with pytest.raises(PlanError, match="more than once per forward"):
        discover_stages(Peeking((0, 1, 0)), inputs)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_flops_are_counted_at_the_length_asked_for_attention_included(implementation: str) -> None:
    model = build("llama")
    model.set_attn_implementation(implementation)
    tiny = discover_stages(model, batch())
    short, long = (discover_stages(model, batch(), cost_tokens=(1, length)) for length in (256, 4096))
    assert (tiny.num_tokens, short.num_tokens, long.num_tokens) == (16, 256, 4096)
    assert short.fingerprint() == long.fingerprint() == tiny.fingerprint()
    # 4 heads of 8: two products of 2 * length * 32 FLOPs a token each
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    for plan, length in ((short, 256), (long, 4096)):
        per_token = block_costs(model, plan, flops_per_byte=0.0).blocks[0]
        assert per_token == pytest.approx(2 * weights + 4 * length * 32, rel=1e-3)
