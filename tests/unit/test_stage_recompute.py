"""Checkpointed groups of blocks: same gradients, fewer saved bytes, each block run a second time once.

A failure here is in what a group keeps of its inputs, in the random or autocast state of the second run, or in how a
group composes with the stage that ends inside the model's own loop.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stage_models import (
    BLOCKS,
    VOCAB,
    assert_same_gradients,
    batch,
    build,
    cut,
    models_of,
    summed,
    unsplit,
    zero_grad,
)
from thinning import in_turns
from torch import Tensor, nn

from hf_parallel.activation_checkpointing.recompute import Mode, Recomputation, groups_for, recompute_blocks
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import run_stages
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients, accumulate
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


NAMES = ["llama_tied", "gpt2_tied", "mixtral", "gemma3n", "mamba"]
DROPOUT = {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3}


def install(
    stages: Sequence[Stage],
    plan: PipelinePlan,
    bounds: Sequence[int],
    every: int,
    mode: Mode = "block",
    offload: bool = False,
) -> list[Recomputation]:
    """On each model the groups of the blocks that are there."""
    groups = groups_for(bounds, every, mode, plan)
    done = []
    for model in models_of(stages):
        spans = [stage.part.span for stage in stages if stage.model is model]
        mine = [g for g in groups if any(span.lo <= g.start < span.hi for span in spans)]
        products = every if mode == "selective" else None
        done.append(recompute_blocks(model, plan.stack, mine, offload=offload, products=products))
    return done


def in_flight(stages: Sequence[Stage], inputs: Sequence[dict[str, Any]], seeds: Sequence[int | None]) -> list[Tensor]:
    """All forwards first, then the backwards in the same order: every microbatch is alive at once."""
    sent: list[list[tuple[Tensor, ...]]] = [[] for _ in inputs]
    received: list[list[tuple[Tensor, ...]]] = [[()] for _ in inputs]
    losses: list[Tensor] = []
    for m, (one, seed) in enumerate(zip(inputs, seeds, strict=True)):
        for stage in stages:
            stage.seed = seed
            out = stage(received[m][-1], **one)
            if stage.is_last:
                losses.append(out.loss)
            else:
                sent[m].append(out)
                received[m].append(tuple(t.detach().requires_grad_(t.requires_grad) for t in out))
    for m, loss in enumerate(losses):
        loss.backward()
        for out, got in zip(reversed(sent[m]), reversed(received[m][1:]), strict=True):
            pairs = [(o, g.grad) for o, g in zip(out, got, strict=True) if o.requires_grad and g.grad is not None]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [loss.detach() for loss in losses]


MICROBATCHES = [batch(2, 8), batch(3, 11, seed=1, left=True), batch(1, 7, seed=2), batch(2, 9, seed=3)]


MODES: list[tuple[int, Mode, bool]] = [
    (1, "block", False), (2, "block", True), (8, "block", False), (2, "alternate", True), (1, "selective", False),
    (2, "selective", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), in_turns(NAMES, MODES, step=2))
def test_four_microbatches_in_flight_give_the_unsplit_gradients(name: str, how: tuple[int, Mode, bool]) -> None:
    every, mode, offload = how
    model = build(name)
    plan = discover_stages(model, batch())
    bounds = [0, 3, plan.num_blocks]
    total: dict[str, Any] = {}
    expected = []
    for one in MICROBATCHES:
        loss, gradients = unsplit(model, one)
        expected.append(loss)
        total = {
            n: g if total.get(n) is None else total[n] if g is None else total[n] + g for n, g in gradients.items()
        }
    model.zero_grad(set_to_none=True)
    stages = cut(model, bounds, plan)
    done = install(stages, plan, bounds, every, mode, offload)
    losses = in_flight(stages, MICROBATCHES, [None] * 4)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(total, summed(stages, list(total)))
    checkpointed = sum(len(group) for one in done for group in one.groups)
    assert checkpointed == (
        plan.num_blocks
        if mode != "alternate"
        else sum((hi - lo + 1) // 2 for lo, hi in [(0, 3), (3, plan.num_blocks)])
    )
    assert sum(one.num_recomputed for one in done) == 4 * checkpointed


@pytest.mark.parametrize("first", ["cut", "recompute"])
@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gemma3n"])
def test_virtual_stages_and_a_tail_only_stage_recompute_their_own_blocks(name: str, first: str) -> None:
    model = build(name)
    plan = discover_stages(model, batch())
    last = plan.num_blocks
    loss, expected = unsplit(model, batch())
    model.zero_grad(set_to_none=True)
    for bounds, placement in (([0, 2, 4, last], [(0, 2), (1,)]), ([0, 2, last, last], [(0, 2), (1,)])):
        if first == "cut":
            stages = cut(model, bounds, plan, placement)
            install(stages, plan, bounds, 2)
        else:
            stages = []
            for indices in placement:
                copied = build(name)
                recompute_blocks(copied, plan.stack, groups_for(bounds, 2, "block", plan))
                stages += cut_stages(copied, plan, bounds, indices, copied.forward).values()
            stages.sort(key=lambda stage: stage.stage_index)
        torch.testing.assert_close(run_stages(stages, batch()), loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(expected, summed(stages, list(expected)))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("every", "mode"), [(1, "block"), (2, "block"), (5, "block"), (2, "selective")])
def test_dropout_masks_are_replayed_and_the_random_state_moves_as_without(
    every: int, mode: Mode, seed: int | None
) -> None:
    model = build("gpt2_tied", **DROPOUT)
    plan = discover_stages(model, batch())
    bounds = [0, 3, BLOCKS]
    results = []
    for on in (False, True):
        stages = cut(model, bounds, plan)
        if on:
            install(stages, plan, bounds, every, mode)
        torch.manual_seed(9)
        losses = in_flight(stages, MICROBATCHES, [None if seed is None else seed + m for m in range(4)])
        names = [name for name, _ in model.named_parameters()]
        results.append((losses, summed(stages, names), torch.rand(3)))
    (losses, expected, after), (got_losses, got, got_after) = results
    torch.testing.assert_close(got_losses, losses, rtol=0, atol=0)
    assert_same_gradients(expected, got)
    torch.testing.assert_close(got_after, after, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_autocast_is_repeated(mode: Mode) -> None:
    model = build("llama_tied")
    plan = discover_stages(model, batch())
    bounds = [0, 3, BLOCKS]
    results = []
    for on in (False, True):
        stages = cut(model, bounds, plan)
        if on:
            install(stages, plan, bounds, 2, mode)
        with torch.autocast("cpu", torch.bfloat16):
            first = stages[0]((), **batch())
            received = first[0].detach().requires_grad_()
            loss = stages[1]((received,), **batch()).loss
        loss.backward()  # outside autocast, as trainers do
        torch.autograd.backward(first, [received.grad])
        results.append(summed(stages, [name for name, _ in model.named_parameters()]))
    assert_same_gradients(*results)


@pytest.mark.parametrize("products", [None, 2])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2_tied"])
def test_weight_gradients_may_be_put_off(name: str, products: int | None) -> None:
    model = build(name)
    plan = discover_stages(model, batch())
    loss, expected = unsplit(model, batch())
    model.zero_grad(set_to_none=True)
    (stage,) = cut(model, [0, BLOCKS], plan)
    delayed = WeightGradients(stage.model)
    groups = groups_for([0, BLOCKS], 2, "selective" if products else "block", plan)
    done = recompute_blocks(stage.model, plan.stack, groups, products=products)
    with delayed.deferring() as pending:
        torch.testing.assert_close(run_stages([stage], batch()), loss, rtol=1e-6, atol=1e-6)
    assert len(pending) == delayed.layers
    accumulate(pending)
    assert done.num_recomputed == BLOCKS
    assert_same_gradients(expected, summed([stage], list(expected)))


def saved_bytes(stage: Stage) -> tuple[int, Any]:
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage((), **batch(4, 32))
    return total, out


def test_saved_bytes_fall_with_the_share_of_checkpointed_blocks() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    bounds = [0, 4, BLOCKS]
    sizes = {}
    for label, every, mode in (("none", 0, "block"), ("half", 2, "alternate"), ("all", 1, "block")):
        stages = cut(model, bounds, plan)
        if every:
            install(stages, plan, bounds, every, mode)
        sizes[label], _ = saved_bytes(stages[0])
    assert 0.4 < sizes["half"] / sizes["none"] < 0.6
    assert sizes["all"] < 0.05 * sizes["none"]


@pytest.mark.parametrize("offload", [False, True])
def test_a_group_keeps_its_first_input_only_and_nothing_after_the_backward(offload: bool) -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    (stage,) = cut(model, [0, BLOCKS], plan)
    done = recompute_blocks(stage.model, plan.stack, groups_for([0, BLOCKS], 5, "block", plan), offload=offload)
    seen: list[Any] = []
    for block in stage.model.model.layers:
        block.register_forward_hook(lambda m, args, out: seen.append(weakref.ref(out)))
    gc.collect()
    gc.disable()  # nothing may need the cycle collector
    try:
        loss = stage((), **batch()).loss
        assert [ref() is not None for ref in seen] == [False] * 4 + [True]  # the final norm keeps the last one
        loss.backward()
        assert done.num_recomputed == BLOCKS
        del loss
        inside = [o for o in gc.get_objects() if type(o).__name__ in ("_Frame", "Kept", "HostCopy", "KeptResults")]
        assert not inside
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_two_backwards_through_one_forward_recompute_twice(mode: Mode) -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    (stage,) = cut(model, [0, BLOCKS], plan)
    [done] = install([stage], plan, [0, BLOCKS], 2, mode, offload=True)
    loss = stage((), **batch()).loss
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in stage.model.named_parameters()}
    loss.backward()
    assert done.num_recomputed == 2 * BLOCKS
    for name, parameter in stage.model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-6, atol=1e-7)


def test_without_autograd_nothing_is_checkpointed() -> None:
    model = build("llama").eval()
    plan = discover_stages(model, batch())
    (stage,) = cut(model, [0, BLOCKS], plan)
    done = recompute_blocks(stage.model, plan.stack, groups_for([0, BLOCKS], 2, "block", plan))
    with torch.no_grad():
        torch.testing.assert_close(stage((), **batch()).logits, model(**batch()).logits, rtol=0, atol=0)
    assert done.num_recomputed == 0


def test_an_error_inside_a_group_leaves_the_stage_usable() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    loss, expected = unsplit(model, batch())
    model.zero_grad(set_to_none=True)
    (stage,) = cut(model, [0, BLOCKS], plan)
    recompute_blocks(stage.model, plan.stack, groups_for([0, BLOCKS], 3, "block", plan))
    handle = stage.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage((), **batch())
    handle.remove()
    torch.testing.assert_close(run_stages([stage], batch()), loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed([stage], list(expected)))


def test_checkpointing_of_the_models_own_is_refused_before_and_after() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    model.activation_checkpointing_enable()
    with pytest.raises(UnsupportedError, match=r"gradient_checkpointing is on together with activation_checkpointing"):
        recompute_blocks(model, plan.stack, [range(5)])
    model.activation_checkpointing_disable()
    recompute_blocks(model, plan.stack, [range(5)])
    model.activation_checkpointing_enable()
    with pytest.raises(UnsupportedError, match=r"block 0\.gradient_checkpointing is on"):
        model(**batch())


def test_groups_stay_inside_stages_and_have_at_most_every_blocks() -> None:
    plan = discover_stages(build("llama"), batch())
    assert groups_for([0, 3, 5], 2, "block", plan) == [range(0, 2), range(2, 3), range(3, 5)]
    assert groups_for([0, 5], 9, "block", plan) == [range(0, 5)]
    assert groups_for([0, 5, 5], 3, "block", plan) == [range(0, 3), range(3, 5)]
    assert groups_for([0, 3, 5], 2, "alternate", plan) == [range(0, 1), range(2, 3), range(3, 4)]
    assert groups_for([0, 3, 5], 1, "alternate", plan) == [range(j, j + 1) for j in range(5)]
    with pytest.raises(PlanError, match="every=0 must be at least 1"):
        groups_for([0, 5], 0, "block", plan)
    with pytest.raises(PlanError, match="must be disjoint and within the 5 blocks"):
        recompute_blocks(build("llama"), plan.stack, [range(3), range(2, 4)])


class Between(nn.Module):
    """Scales what block 1 returned before block 2 sees it, and slices a table of the prologue before every block."""

    def __init__(self, *, skips: tuple[int, ...] = (), in_place: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.table = nn.Parameter(torch.randn(4, 8))

        class Block(nn.Linear):
            odd = False

            def forward(self, given: Tensor, row: Tensor) -> Tensor:
                if self.odd:
                    given = given.exp()
                return super().forward(given.mul_(2) if in_place else given).tanh() * row

        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)
        self.skips = skips

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden, table = self.embed(input_ids) * 1.0, self.table.exp()
        for index, block in enumerate(self.blocks):
            if index not in self.skips:
                hidden = block(hidden, table[index] * 1.5)
            if index == 1:
                hidden = hidden.sin()
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


TOY = {"input_ids": batch()["input_ids"], "labels": batch()["labels"]}


@pytest.mark.parametrize("skips", [(), (2,)])
def test_code_between_blocks_ends_a_group_and_that_is_said(skips: tuple[int, ...], caplog: Any) -> None:
    torch.manual_seed(0)
    model = Between(skips=skips)
    plan = discover_stages(model, TOY)
    assert plan.joins(1)
    assert not plan.joins(2)
    with caplog.at_level(logging.WARNING):
        groups = groups_for([0, 4], 4, "block", plan)
    assert groups == ([range(0, 2), range(3, 4)] if skips else [range(0, 2), range(2, 4)])
    assert ("computes between its blocks (before block 2)" in caplog.text) != bool(skips)
    loss, expected = unsplit(model, TOY)
    # Groups that ignore the code between are still right, they only keep more.
    for chosen in (groups, [range(0, 4)], [range(0, 3)]):
        (stage,) = cut(model, [0, 4], plan)
        zero_grad([stage])
        recompute_blocks(stage.model, plan.stack, chosen)
        torch.testing.assert_close(run_stages([stage], TOY), loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(expected, summed([stage], list(expected)))


def test_a_block_that_changes_its_input_in_place_is_refused() -> None:
    model = Between(in_place=True)
    recompute_blocks(model, "blocks", [range(0, 2)])
    with pytest.raises(PlanError, match=r"a block of \[0, 2\) changes a tensor it was given in place"):
        model(**TOY)


def test_a_second_run_that_takes_another_path_is_named() -> None:
    model = Between()
    recompute_blocks(model, "blocks", [range(0, 2)])
    loss, _ = model(**TOY)
    model.blocks[1].odd = True
    with pytest.raises(PlanError, match=r"blocks \[0, 2\) took another path when they were run again"):
        loss.backward()
