"""The self-check accepts right cuts, catches planted faults, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from stage_models import VOCAB, batch, build
from torch import Tensor, nn

from hf_parallel.engine.plan.head import judge_head
from hf_parallel.errors import PlanError
from hf_parallel.model.samples import tiny_samples
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.loss_kind import judge_loss
from hf_parallel.pipeline_parallel.plan.verify_stages import check_split


def forward_of(model: nn.Module) -> Any:
    return model.forward


class Plain(nn.Module):
    def __init__(self, *, peeks: bool = False, skips: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)
        self.peeks, self.skips = peeks, skips

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if index in self.skips:
                continue
            # Python control flow on a value, which no slice of tensor ops can see: on a later stage it is a zero.
            doubled = self.peeks and index == 1 and not hidden.any()
            hidden = block(hidden)
            hidden = hidden * 2 if doubled else hidden
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def samples() -> Any:
    return tiny_samples(VOCAB)


def test_a_function_over_the_forward_that_calls_this_very_model_leaves_no_gradients() -> None:
    model, seen = build("llama_tied"), []
    pair = tiny_samples(VOCAB, use_cache=False)
    plan = discover_stages(model, pair[0])
    own = model.forward
    model.forward = lambda **inputs: own(**inputs)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.shape))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    with pytest.raises(PlanError):
        check_split(model, plan, [0, 2, plan.num_blocks], pair, forward_of)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not seen


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gemma3n"])
def test_right_cuts_pass_and_the_model_is_untouched(name: str) -> None:
    model = build(name)
    pair = tiny_samples(VOCAB, use_cache=False)
    plan = discover_stages(model, pair[0])
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    check_split(model, plan, [0, 2, plan.num_blocks], pair, forward_of)
    torch.testing.assert_close(torch.rand(2), expected, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_several_stages_of_a_rank_and_a_tail_only_stage_pass(name: str) -> None:
    model = build(name)
    pair = tiny_samples(VOCAB, use_cache=False)
    plan = discover_stages(model, pair[0])
    for bounds, placement in (
        ([0, 1, 3, 4, 5], [(0, 3), (1, 2)]),
        ([0, 1, 3, 4, 5], [(0, 2), (1, 3)]),
        ([0, 1, 3, 5, 5], [(0, 2), (1, 3)]),
        ([0, 2, 5, 5], None),
    ):
        check_split(model, plan, bounds, pair, forward_of, placement)


def test_a_model_that_rescales_its_weights_in_evaluation_passes_after_one() -> None:
    model: Any = zoo.build("rwkv@rescale")
    plan = discover_stages(model, zoo.batch("rwkv@rescale", model))
    logits = model(torch.tensor([[3, 4, 5]])).logits
    judge_head(model, zoo.batch("rwkv@rescale", model))  # in evaluation mode
    check_split(model, plan, [0, 3, 5], tiny_samples(VOCAB, use_cache=False), lambda copied: copied.forward)
    assert torch.allclose(model(torch.tensor([[3, 4, 5]])).logits, logits, rtol=1e-6)


def test_skipped_blocks_pass() -> None:
    model = Plain(skips=(1, 3))
    plan = discover_stages(model, samples()[0])
    check_split(model, plan, [0, 1, 4], samples(), forward_of)
    check_split(model, plan, [0, 2, 3, 4], samples(), forward_of, [(0, 2), (1,)])


def test_a_placement_that_leaves_a_stage_out_is_refused() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    for placement in ([(0,)], [(0, 1), (1,)], [(0, 1, 2)]):
        with pytest.raises(PlanError, match=r"must name each of the stages 0 \.\. 1 once"):
            check_split(model, plan, [0, 2, 5], [batch()], forward_of, placement)


def test_the_very_cut_of_each_rank_is_checked() -> None:
    torch.manual_seed(0)
    model = Plain(peeks=True)
    plan = discover_stages(model, samples()[0], try_meta=False)
    # Blocks 2 and 3 see real embeddings where block 0 lives too, and zeros anywhere else.
    check_split(model, plan, [0, 1, 2, 4], samples(), forward_of, [(0, 2), (1,)])
    with pytest.raises(PlanError, match=r"the split model's loss .* differs"):
        check_split(model, plan, [0, 1, 2, 4], samples(), forward_of, [(0,), (1, 2)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_pass_at_their_own_tolerance(dtype: torch.dtype) -> None:
    model = build("llama_tied").to(dtype)
    pair = (batch(), batch(3, 11, seed=1))
    check_split(model, discover_stages(model, pair[0]), [0, 1, 3, 5], pair, forward_of)


def test_dropout_does_not_disturb_the_comparison() -> None:
    model = build("gpt2_tied", embd_pdrop=0.5, attn_pdrop=0.5, resid_pdrop=0.5)
    pair = tiny_samples(VOCAB, use_cache=False)
    check_split(model, discover_stages(model, pair[0]), [0, 2, 5], pair, forward_of)


class Reversible(torch.autograd.Function):
    """Runs all blocks without a graph and differentiates them itself, as reversible stacks do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(hidden)
        for block in blocks:
            hidden = block(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (hidden,) = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            out = hidden
            for block in ctx.blocks:
                out = block(out)
        out.backward(grads[0])
        return hidden.grad, None


class ReversibleStack(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        logits = self.head(Reversible.apply(self.embed(input_ids), self.blocks))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_blocks_inside_a_custom_autograd_function_are_caught_by_their_gradients() -> None:
    model = ReversibleStack()
    plan = discover_stages(model, samples()[0])
    with pytest.raises(
        PlanError,
        match=r"cannot pipeline ReversibleStack: the split model's gradients differ.*"
        r"\(\d+ of 11 parameters, first: embed\.weight.*Nothing was changed",
    ):
        check_split(model, plan, [0, 2, 4], samples(), forward_of)


def test_control_flow_on_values_is_caught_by_the_loss() -> None:
    torch.manual_seed(0)
    model = Plain(peeks=True)
    plan = discover_stages(model, samples()[0])
    check_split(model, plan, [0, 3, 4], samples(), forward_of)  # the branch lies well before this cut
    with pytest.raises(PlanError, match=r"the split model's loss .* differs from the unsplit model's"):
        check_split(model, plan, [0, 2, 4], samples(), forward_of)


def test_a_loss_that_honours_the_item_count_is_recognised() -> None:
    inputs = batch()
    assert judge_loss(build("llama"), inputs).kind == "sum_over_items"
    assert judge_loss(build("mixtral"), inputs).kind == "sum_and_extra"
    assert judge_loss(build("gpt2_tied", resid_pdrop=0.5), inputs).kind == "sum_over_items"
    assert judge_loss(Plain(), samples()[0]).kind == "mean"


def test_a_loss_that_swallows_the_item_count_is_a_mean() -> None:
    model = build("llama")
    inner = model.loss_function
    model.loss_function = lambda *args, num_items_in_batch=None, **kwargs: inner(*args, **kwargs)
    assert judge_loss(model, batch()).kind == "mean"


def test_a_loss_that_is_not_finite_is_named_as_such() -> None:
    model = build("llama")
    model.lm_head.weight.data[0] = float("nan")
    with pytest.raises(PlanError, match="own loss on sample 0 of the self-check is nan"):
        check_split(model, discover_stages(model, batch()), [0, 2, 5], [batch()], forward_of)


def test_samples_without_labels_are_refused() -> None:
    model = build("llama")
    pair = [{k: v for k, v in sample.items() if k != "labels"} for sample in samples()]
    with pytest.raises(PlanError, match="need 'labels'"):
        check_split(model, discover_stages(model, pair[0]), [0, 2, 5], pair, forward_of)
