"""Means over labels, microbatch by microbatch: they add up to that of the batch, whichever rows have labels at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss
from hf_parallel.tensor_parallel.run import vocab_loss


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def quotient(logits: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / labels.ne(-100).sum()


def sharded(logits: Tensor, labels: Tensor) -> Tensor:
    return vocab_loss.vocab_parallel_loss(logits, None, None, 0, shift_labels=labels)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [[], [0, 1], [2, 3, 4], [0, 1, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("function", [mean, quotient, sharded])
def test_microbatches_without_labels_add_nothing(
    function: Callable[[Tensor, Tensor], Tensor], masked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("max_over", "sum_over"):  # one rank has the whole vocabulary
        monkeypatch.setattr(vocab_loss, name, lambda tensor, group: tensor.clone())
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(7, 4, generator=generator, requires_grad=True)
    hidden = torch.randn(5, 3, 4, generator=generator)
    labels = torch.randint(7, (5, 3), generator=generator)
    labels[3, :2] = -100
    labels[masked] = -100

    losses = MicrobatchLoss(nn.Module(), "mean", 3, shifted=False)
    total = torch.zeros(())
    gradient = torch.zeros_like(head)
    for microbatch, share in losses.cut(0, {"inputs_embeds": hidden, "labels": labels}):
        loss = losses.of({"loss": function(microbatch["inputs_embeds"] @ head.T, microbatch["labels"])}, share)
        gradient += torch.autograd.grad(loss, head)[0]
        total = total + loss.detach()

    whole = function(hidden @ head.T, labels)
    torch.testing.assert_close(total, whole.detach(), equal_nan=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, head)[0])
    assert total.isnan() == (len(masked) == 5)
    assert gradient.isfinite().all()
