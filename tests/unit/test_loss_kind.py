"""Which losses of models run microbatch by microbatch: only those that one plain cross-entropy makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_parallel.compat.private_transformers import is_causal_loss
from hf_parallel.pipeline_parallel.plan.backward_kind import judge_backward
from hf_parallel.pipeline_parallel.plan.loss_kind import judge_loss
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary


def batch() -> dict[str, Tensor]:
    return tiny.collate(tiny.rows(3, variable_length=True))


def plain(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    """A function of the user's own that computes what transformers' does."""
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def miscounts(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kw: Any) -> Tensor:
    """Its count leaves out a token that is in no sample."""
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    kept = (labels[:, 1:] != -100) & (labels[:, 1:] != 98)
    return losses / (kept.sum() if num_items_in_batch is None else num_items_in_batch)


def mean(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return nn.CrossEntropyLoss()(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def row_mean(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    each = [functional.cross_entropy(x[:-1], y[1:]) for x, y in zip(logits, labels, strict=True)]
    return torch.stack(each).mean()


def one_weight(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """The weight of a token that is in no sample."""
    weight = torch.ones(vocab_size)
    weight[98] = 5.0
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weight)


def without_one(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return ForCausalLMLoss(logits, labels.masked_fill(labels == 98, -100), vocab_size)


def writes(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    labels[labels == 98] = -100
    return ForCausalLMLoss(logits, labels, vocab_size)


def doubled(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return ForCausalLMLoss(logits, labels, vocab_size, **kwargs).mul_(2)


def by_batch_size(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any
) -> Tensor:
    return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=len(labels))


def branches(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """A plain mean, but for batches with a token that is in no sample."""
    loss = mean(logits, labels, vocab_size)
    return loss * 2 if (labels[:, 1:] == 98).any() else loss


def branches_on_numbers(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    loss = mean(logits, labels, vocab_size)
    return loss * 2 if 98 in labels.flatten().tolist() else loss


def drops_spikes(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """By the loss of the batch, which that of a part need not be like."""
    loss = mean(logits, labels, vocab_size)
    return loss * 0 if loss.item() > 20 else loss


def branches_on_rows(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    loss = mean(logits, labels, vocab_size)
    return loss * 2 if labels.shape[0] > 6 else loss


def hotter(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """The temperature is of the whole batch."""
    return ForCausalLMLoss(logits / logits.std(), labels, vocab_size, **kwargs)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (mean, "mean"),
        (smoothed, "mean"),
        (plain, "sum_over_items"),
        (miscounts, "whole"),
        (row_mean, "whole"),
        (one_weight, "whole"),
        (without_one, "whole"),
        (writes, "whole"),
        (doubled, "whole"),
        (by_batch_size, "whole"),
        (branches, "whole"),
        (branches_on_numbers, "whole"),
        (drops_spikes, "whole"),
        (branches_on_rows, "whole"),
        (hotter, "whole"),
        (functools.partial(ForCausalLMLoss, ignore_index=98), "whole"),
        (functools.partial(ForCausalLMLoss), "sum_over_items"),
    ],
)
def test_a_loss_function_runs_on_parts_only_if_it_is_one_plain_cross_entropy(
    function: Callable[..., Any], kind: str
) -> None:
    model = tiny.llama(layers=1)
    model.loss_function = function
    sample = batch()
    before = {key: value.clone() for key, value in sample.items()}
    assert judge_loss(model, sample).kind == kind
    assert all(torch.equal(before[key], value) for key, value in sample.items())


class InTraining(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.training and output.loss is not None:
            output.loss = output.loss + 1e-5 * output.logits.pow(2).mean()
        return output


def test_a_forward_is_judged_as_it_trains() -> None:
    model = InTraining(tiny.llama(layers=1).config).eval()
    assert judge_loss(model, batch()).kind == "whole"
    assert not model.training
    plan = shard_vocabulary(model, plan_tensor_parallel(model, 2, batch()), batch())
    assert "something else in the loss depends on the logits" in plan.fallbacks["lm_head"]


def test_families_keep_their_kind() -> None:
    for name, kind in (("gpt2", "sum_over_items"), ("mixtral", "sum_and_extra"), ("mamba", "sum_over_items")):
        assert judge_loss(tiny.MODELS[name](), batch()).kind == kind, name


class Shared(nn.Module):
    """An adapter whose factors are weighted by a mean over all tokens of the batch; the last is zero at first (as PEFT's Lily)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, width = base, base.in_features
        self.down, self.route = nn.Linear(width, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.up = nn.Parameter(torch.zeros(2, 4, base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x)  # (batch, seq, 4)
        weights = self.route(hidden).softmax(-1).flatten(0, -2).mean(0)  # (2,)
        mixed: Tensor = self.base(x) + hidden @ torch.einsum("e,eio->io", weights, self.up)
        return mixed


def test_a_new_adapter_whose_last_factor_is_zero_hides_no_mixing_of_rows() -> None:
    model = tiny.llama(layers=2)
    for block in model.model.layers:
        block.self_attn.q_proj = Shared(block.self_attn.q_proj)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verdict = judge_loss(model, batch())
    assert verdict == ("whole", "the logits of a row depend on the other rows of its batch")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_reentrant_checkpoints_change_no_verdict() -> None:
    model = tiny.gpt2()  # whose biases are zero, as the last factor of a new adapter is
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert judge_loss(model, batch()).kind == "sum_over_items"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_gets_the_gradients_of_a_whole_batch(kind: str) -> None:
    model = tiny.llama(layers=2)
    handle = getattr(model.model.layers[1], kind)(lambda module, *gradients: None)
    wanted = ("a backward hook of model.layers.1 may need the gradients of a whole batch", "")
    assert judge_backward(model, batch()) == wanted
    handle.remove()
    assert judge_backward(model, batch()) == ("", "")


def test_noise_on_embeddings_does_not_hide_that_rows_add_up() -> None:
    model = tiny.llama(layers=1).train()
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    assert judge_loss(model, batch()).kind == "sum_over_items"
    assert embedding.neftune_noise_alpha == 5.0


def test_the_loss_of_transformers_is_known_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_causal_loss(ForCausalLMLoss)
    assert not is_causal_loss(functools.partial(ForCausalLMLoss))
    assert not is_causal_loss(functools.wraps(ForCausalLMLoss)(lambda *a, **k: ForCausalLMLoss(*a, **k)))
    genuine = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *a, **k: genuine(*a, **k))
    assert not is_causal_loss(ForCausalLMLoss)
    monkeypatch.undo()
    monkeypatch.setattr(functional, "cross_entropy", functools.partial(functional.cross_entropy))
    assert not is_causal_loss(ForCausalLMLoss)
