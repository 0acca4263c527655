"""If these fail, `pipeline.costs: measured` cuts by wrong times, or measuring changes the model that is trained."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stage_models import VOCAB, build
from torch import Tensor, nn

from hf_parallel.model.samples import probe_samples, typical_sample, typical_shape
from hf_parallel.pipeline_parallel.plan import measure
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.measure import measure_costs


class Clock:
    """Passes only while a layer sleeps."""

    now = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.now += seconds


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        Clock.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        Clock.sleep(ctx.backward_seconds)
        return grads[0], None, None


class Slow(nn.Module):
    """A layer that takes some milliseconds more, forward and backward."""

    def __init__(self, inner: nn.Module, forward: float, backward: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, (forward, backward)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.inner(_Sleep.apply(x, *self.seconds), *args, **kwargs)
        return out


def slow_llama() -> Any:
    """Block j sleeps 20 (j + 1) ms forward and 10 (5 - j) ms backward, the head 70 and 30 ms."""
    model: Any = build("llama")
    for j, block in enumerate(model.model.layers):
        block.mlp = Slow(block.mlp, 0.02 * (j + 1), 0.01 * (5 - j))
    model.lm_head = Slow(model.lm_head, 0.07, 0.03)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_part_gets_its_own_time(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    model = slow_llama()
    plan = discover_stages(model, probe_samples(model, VOCAB))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    costs = measure_costs(model, plan, typical_sample(model, VOCAB), repetitions=3)
    again = [20 * (j + 1) if checkpointing else 0 for j in range(5)]
    back = costs.of_backward()
    assert costs.unit == back.unit == "ms"
    assert [*costs.blocks, costs.last] == pytest.approx([20, 40, 60, 80, 100, 70])
    slept = [slept + more for slept, more in zip([50, 40, 30, 20, 10, 30], [*again, 0], strict=True)]
    assert [*back.blocks, back.last] == pytest.approx(slept)
    assert (costs.first, back.first) == pytest.approx((0, 0), abs=1e-9)


@pytest.mark.parametrize("training", [False, True])
def test_measuring_leaves_the_model_as_it_was(training: bool) -> None:
    model: Any = build("gpt2_tied", resid_pdrop=0.1).train(training)
    plan = discover_stages(model, probe_samples(model, VOCAB))
    first = next(iter(model.parameters()))
    first.grad = torch.ones_like(first)
    before, hooks = copy.deepcopy(model.state_dict()), [len(m._forward_hooks) for m in model.modules()]
    torch.manual_seed(5)
    draw = torch.rand(3)
    torch.manual_seed(5)
    measure_costs(model, plan, typical_sample(model, VOCAB), repetitions=1)
    assert torch.equal(torch.rand(3), draw)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training is training for module in model.modules())
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * (len(list(model.parameters())) - 1)
    assert bool((first.grad == 1).all())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_blocks_behind_frozen_ones_and_skipped_ones_still_get_times() -> None:
    model: Any = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    plan = discover_stages(model, probe_samples(model, VOCAB))
    costs = measure_costs(model, plan, typical_sample(model, VOCAB), repetitions=2)
    assert min(costs.blocks) > 0
    assert costs.of_backward().first == 0
    assert costs.of_backward().blocks[:2] == (0, 0)
    assert min(costs.of_backward().blocks[2:]) > 0
    assert max(costs.of_weights().blocks[:2]) == 0


def test_the_typical_batch_is_no_longer_than_the_model_takes() -> None:
    model = build("llama")
    assert typical_shape(model) == (1, 64)
    assert typical_sample(model, VOCAB)["input_ids"].shape == (1, 64)
    assert typical_shape(nn.Linear(1, 1)) == (1, 512)
