"""Stages run one after the other give the unsplit model's loss, gradients and trajectory.

A failure here is in the slice (something that should cross does not), in the address of a crossing, or in what the cut
dropped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_models import CONFIGS, assert_same_gradients, batch, build, cut, summed, unsplit, zero_grad
from thinning import in_turns

from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import run_stages
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CONFIGS)
def test_stages_give_the_unsplit_loss_and_gradients(name: str) -> None:
    model = build(name)
    plan = discover_stages(model, batch())
    last = plan.num_blocks
    for bounds in ([0, 2, last], [0, 1, 3, last]):
        stages = cut(model, bounds, plan)
        for inputs in (batch(), batch(3, 11, seed=1, left=True), batch(1, 7, seed=2)):
            loss, expected = unsplit(model, inputs)
            zero_grad(stages)
            got = run_stages(stages, inputs)
            torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-6)
            assert_same_gradients(expected, summed(stages, list(expected)))


PLACEMENTS: list[tuple[list[int], list[tuple[int, ...]]]] = [
    ([0, 1, 2, 4], [(0, 2), (1, 3)]),  # interleaved
    ([0, 1, 3, 4], [(0, 3), (1, 2)]),  # there and back
    ([0, 2, 4, -1], [(0, 1, 2, 3)]),  # all on one rank, the last with the tail only
]


@pytest.mark.parametrize("name", in_turns(list(CONFIGS), step=2))
def test_several_stages_on_one_rank_give_the_unsplit_loss_and_gradients(name: str) -> None:
    model = build(name)
    plan = discover_stages(model, batch())
    for inner, placement in PLACEMENTS:
        bounds = [plan.num_blocks if b < 0 else b for b in inner] + [plan.num_blocks]
        stages = cut(model, bounds, plan, placement)
        for inputs in (batch(), batch(3, 11, seed=1, left=True)):
            loss, expected = unsplit(model, inputs)
            zero_grad(stages)
            got = run_stages(stages, inputs)
            torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-6)
            assert_same_gradients(expected, summed(stages, list(expected)))


@pytest.mark.parametrize("name", in_turns(list(CONFIGS)[::-1], step=2))
def test_a_stage_with_the_tail_only_gives_the_unsplit_loss_and_gradients(name: str) -> None:
    model = build(name)
    plan = discover_stages(model, batch())
    stages = cut(model, [0, 2, plan.num_blocks, plan.num_blocks], plan)
    loss, expected = unsplit(model, batch())
    torch.testing.assert_close(run_stages(stages, batch()), loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed(stages, list(expected)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_of_virtual_stages_recompute_their_own_code(reentrant: bool) -> None:
    model = build("llama_tied")
    plan = discover_stages(model, batch())
    loss, expected = unsplit(model, batch())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    stages = cut(model, [0, 1, 3, 4, 5], plan, [(0, 2), (1, 3)])
    torch.testing.assert_close(run_stages(stages, batch()), loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed(stages, list(expected)))


@pytest.mark.parametrize(("name", "minimum"), [("llama", 1), ("mixtral", 3), ("gemma3n", 3)])
def test_crossings_hold_what_later_blocks_need(name: str, minimum: int) -> None:
    plan = discover_stages(build(name), batch())
    assert len(plan.crossings(2)) == minimum if name != "gemma3n" else len(plan.crossings(4)) >= minimum


def test_three_adamw_steps_with_tied_weights_follow_the_unsplit_model() -> None:
    model = build("llama_tied")
    stages = cut(model, [0, 2, 3, 5])
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    whole = torch.optim.AdamW(model.parameters(), **settings)
    parts = [torch.optim.AdamW([p for p in s.model.parameters() if p.requires_grad], **settings) for s in stages]
    for step in range(3):
        inputs = batch(2, 7 + step, seed=step)
        unsplit(model, inputs)
        zero_grad(stages)
        run_stages(stages, inputs)
        total = summed(stages, [name for name, _ in model.named_parameters()])
        for stage in stages:
            for name, parameter in stage.model.named_parameters():
                parameter.grad = total[name]
        for optimizer in [whole, *parts]:
            optimizer.step()
    expected = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reentrant"), [("llama_tied", False), ("mixtral", False), ("gemma3n", False), ("llama_tied", True)]
)
def test_gradient_checkpointing_gives_the_same_gradients(name: str, reentrant: bool) -> None:
    # Reentrant checkpointing detaches what a block leaves anywhere but in its return value, split or not.
    model = build(name)
    plan = discover_stages(model, batch())
    loss, expected = unsplit(model, batch())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    stages = cut(model, [0, 2, 4, plan.num_blocks], plan)
    zero_grad(stages)
    torch.testing.assert_close(run_stages(stages, batch()), loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed(stages, list(expected)))


def test_a_plan_serves_equal_models_that_never_ran_a_forward() -> None:
    plan = discover_stages(build("mixtral"), batch())
    stages: list[Stage] = []
    for index in range(3):
        fresh = build("mixtral")  # transformers installs its output hooks in the first forward
        stages += cut_stages(fresh, plan, [0, 1, 3, 5], (index,), fresh.forward).values()
    loss, expected = unsplit(build("mixtral"), batch())
    torch.testing.assert_close(run_stages(stages, batch()), loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed(stages, list(expected)))


def test_discovery_with_checkpointing_on_finds_the_same_addresses() -> None:
    model = build("mixtral")
    plain = discover_stages(model, batch())
    model.activation_checkpointing_enable()
    assert discover_stages(model, batch()).fingerprint() == plain.fingerprint()


def test_autocast_gives_the_unsplit_loss_and_gradients() -> None:
    model = build("llama_tied")
    stages = cut(model, [0, 3, 5])
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = unsplit(model, batch())
        zero_grad(stages)
        got = run_stages(stages, batch())
    torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed(stages, list(expected)))


def test_many_microbatches_may_be_alive_before_their_backwards() -> None:
    model = build("llama_tied")
    first, last = cut(model, [0, 2, 5])
    inputs = [batch(2, 6, seed=1), batch(3, 9, seed=2), batch(1, 8, seed=3)]
    total: dict[str, Any] = {}
    for one in inputs:
        for name, grad in unsplit(model, one)[1].items():
            total[name] = grad if name not in total else total[name] + grad
    sent = [first((), **one) for one in inputs]
    received = [tuple(t.detach().requires_grad_() for t in payload) for payload in sent]
    losses = [last(payload, **one).loss for payload, one in zip(received, inputs, strict=True)]
    for loss in losses:
        loss.backward()
    for out, got in zip(sent, received, strict=True):
        torch.autograd.backward(out, [t.grad for t in got])
    assert_same_gradients(total, summed([first, last], list(total)))


def test_evaluation_under_no_grad_gives_the_unsplit_logits() -> None:
    model = build("gemma3n").eval()
    stages = cut(model, [0, 2, 6])
    with torch.no_grad():
        expected = model(**batch())
        out = stages[1](stages[0]((), **batch()), **batch())
    assert type(out) is type(expected)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)


def test_hidden_states_that_the_model_returns_cross_too() -> None:
    model = build("llama").eval()
    inputs = {**batch(), "output_hidden_states": True}
    plan = discover_stages(model, inputs)
    stages = cut(model, [0, 3, 5], plan)
    with torch.no_grad():
        expected = model(**inputs).hidden_states
        got = stages[1](stages[0]((), **inputs), **inputs).hidden_states
    assert len(got) == len(expected) == 6
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
