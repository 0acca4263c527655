"""If these fail, a zero-bubble schedule loses weight gradients, counts them twice, or defers nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from stage_models import CONFIGS, assert_same_gradients, batch, build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_parallel.pipeline_parallel.plan.verify_stages import loss_of
from hf_parallel.pipeline_parallel.run.weight_gradients import Pending, WeightGradients, accumulate


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def split_backward(model: nn.Module, inputs: dict[str, Any], mode: WeightGradients) -> tuple[Tensor, Pending]:
    loss = loss_of(model(**inputs))
    with mode.deferring() as pending:
        loss.backward()
    return loss.detach(), pending


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_input_then_weight_gradients_are_those_of_one_backward(name: str, checkpointing: bool) -> None:
    model = build(name)
    other = copy.deepcopy(model)
    if checkpointing and model.supports_gradient_checkpointing:
        other.activation_checkpointing_enable({"use_reentrant": False})
    mode = WeightGradients(other)
    held: list[Pending] = []
    for seed in range(3):  # all weight gradients wait until the last input gradients are made
        loss = loss_of(model(**batch(2, 7 + seed, seed)))
        loss.backward()
        split, pending = split_backward(other, batch(2, 7 + seed, seed), mode)
        torch.testing.assert_close(split, loss.detach(), rtol=1e-6, atol=1e-6)
        held.append(pending)
    assert all(held)
    for pending in held:
        accumulate(pending)
        assert not pending
    assert_same_gradients(gradients(model), gradients(other))


def test_most_weights_of_a_llama_are_put_off_and_nothing_else() -> None:
    model = build("llama")
    _, pending = split_backward(model, batch(), WeightGradients(model))
    waiting = {id(weight) for weight, _, _ in pending}
    matrices = {id(p) for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    assert waiting == matrices
    assert all((p.grad is None) == (id(p) in matrices) for p in model.parameters())


def test_gpt2_conv1d_weights_are_put_off() -> None:
    model = build("gpt2_tied")
    _, pending = split_backward(model, batch(), WeightGradients(model))
    kinds = {id(m.weight) for m in model.modules() if isinstance(m, transformers.pytorch_utils.Conv1D)}
    assert kinds <= {id(weight) for weight, _, _ in pending}


def test_backward_outside_deferring_makes_all_gradients_at_once() -> None:
    model = build("llama_tied")
    other = copy.deepcopy(model)
    loss_of(model(**batch())).backward()
    WeightGradients(other)
    loss_of(other(**batch())).backward()
    assert_same_gradients(gradients(model), gradients(other))


def test_a_weight_with_a_hook_gets_its_gradient_in_the_backward() -> None:
    layer = nn.Linear(3, 2)
    seen: list[Tensor] = []
    layer.weight.register_hook(seen.append)
    mode = WeightGradients(layer)
    loss = layer(torch.ones(4, 3)).sum()
    with mode.deferring() as pending:
        loss.backward()
    assert not pending
    assert torch.equal(seen[0], layer.weight.grad)


def test_a_layer_that_is_frozen_or_not_a_plain_linear_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    model = nn.Sequential(nn.Linear(3, 3), Scaled(3, 3))
    model[0].requires_grad_(False)
    other = copy.deepcopy(model)
    mode = WeightGradients(model)
    assert mode.layers == 1
    x = torch.ones(2, 3)
    loss = model(x).square().sum()
    with mode.deferring() as pending:
        loss.backward()
    other(x).square().sum().backward()
    assert not pending
    assert torch.equal(model[1].weight.grad, other[1].weight.grad)


def test_bfloat16_autocast_gives_the_gradients_of_stock_autocast() -> None:
    model = build("llama_tied")
    other = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(**batch()))
    loss.backward()
    mode = WeightGradients(other)
    with torch.autocast("cpu", torch.bfloat16):
        split = loss_of(other(**batch()))
    with mode.deferring() as pending:
        split.backward()
    accumulate(pending)
    assert torch.equal(split, loss)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=2e-3, msg=name)
        assert q.grad.dtype is torch.float32


def test_a_recomputed_product_is_put_off_once() -> None:
    layer = nn.Linear(3, 3)
    mode = WeightGradients(layer)
    x = torch.ones(2, 3, requires_grad=True)
    loss = checkpoint(lambda v: layer(layer(v)).square(), x, use_reentrant=False).sum()
    with mode.deferring() as pending:
        loss.backward()
    assert len(pending) == 2
