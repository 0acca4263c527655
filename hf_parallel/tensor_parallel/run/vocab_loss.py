"""Cross-entropy over logits whose vocabulary is split over the ranks: no rank sees the logits of the others.

Two small all-reduces a call, of one and of three numbers a token, and none in the backward pass.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, "parallel cross entropy".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_parallel.head.unmade import UnmadeLogits
from hf_parallel.tensor_parallel.run.functions import TPGroup, gather_over, max_over, sum_over


CHUNK_ELEMENTS = 2**22  # of fp32 intermediates: 16 MiB, whatever the batch; larger chunks are not faster
IGNORED = -100


def vocab_parallel_loss(
    logits: Tensor,
    labels: Tensor | None,
    group: TPGroup,
    start: int,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss` from this rank's part of the logits.

    Args:
        logits: f[... S v], columns [start, start + v) of the vocabulary. Computed with in fp32, a chunk at a time; those
            that are not made yet stay so.
        labels: i[... S] in tokens of the full vocabulary; position s is scored against label s + 1.
        group: The tensor-parallel group; all its ranks must call this with the same labels.
        start: First column that this rank has.
        num_items_in_batch: Divisor of the summed loss; None for the number of labels that count.
        ignore_index: Label of positions that do not count.
        shift_labels: i[... S], already shifted; takes the place of `labels`.

    Returns:
        f32[], equal on all ranks; nan if no label counts (0 / 0) or a label is outside of the vocabulary.
    """
    if shift_labels is None:
        if labels is None:
            raise TypeError("the loss needs labels or shift_labels")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)  # (batch * seq,)
    ignored = targets == ignore_index
    if isinstance(logits, UnmadeLogits):
        logits = logits.float()
    if isinstance(logits, UnmadeLogits):
        total = logits.tiled_loss(targets, ignore_index)
    else:
        losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.reshape(-1, logits.shape[-1]), targets, group, start
        )
        total = losses.masked_fill(ignored, 0.0).sum()  # not losses * mask: an ignored label may give nan
    if num_items_in_batch is None:
        return total / (~ignored).sum()
    return total / (
        num_items_in_batch.to(total.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    )


@dataclass(frozen=True)
class SharedColumns:
    """The columns of a head that one rank has, and those of the others.

    Args:
        group: The tensor-parallel group.
        start: First column of this rank.
        most: Columns of the rank with most.
    """

    group: TPGroup
    start: int
    most: int

    def merged(self, top: Tensor, total: Tensor, picked: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Merge columns as `tiles.Columns` does, over the ranks; one small all-gather, of four numbers a token."""
        mine = torch.stack([top, total, picked.masked_fill(~held, 0.0), held.to(top.dtype)])  # (4, tokens)
        tops, totals, labels, holders = torch.stack(gather_over(mine, self.group), 1).unbind()  # (tp, tokens) each
        largest = tops.amax(0)
        log_sum = (totals * (tops - largest).exp()).sum(0).log() + largest
        return log_sum, torch.where(holders.sum(0) > 0, labels.sum(0), torch.nan)


class _CrossEntropy(torch.autograd.Function):
    """Loss f32[N] of each token from logits f[N v] and targets i[N].

    Only the logits are kept for the backward pass, in their own dtype; probabilities are computed again, by chunks.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: TPGroup, start: int) -> Tensor:
        # logits (tokens, vocab / tp); everything below is (tokens,), so the collectives are small.
        top = max_over(torch.cat([part.float().amax(-1) for part, _ in _chunks(logits)]), group)
        sums = [(part.float() - top[rows, None]).exp_().sum(-1) for part, rows in _chunks(logits)]
        column = targets - start
        held = (column >= 0) & (column < logits.shape[-1])  # whether the target is one of this rank's columns
        column = torch.where(held, column, 0)
        picked = logits.gather(-1, column[:, None]).squeeze(-1).float().masked_fill(~held, 0.0)
        total, target, holders = sum_over(
            torch.stack([torch.cat(sums), picked, held.float()]), group
        ).unbind()  # (3, tokens)
        log_sum = total.log() + top
        ctx.save_for_backward(logits, log_sum, column, held)
        return torch.where(holders > 0, log_sum - target, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum, column, held = ctx.saved_tensors
        gradient = torch.empty_like(
            logits
        )  # (tokens, vocab / tp): softmax minus one-hot, times the gradient of the loss
        for part, rows in _chunks(logits):
            probability, scale = _less(part, log_sum[rows, None], gradient[rows]).exp_(), grads[0][rows, None]
            probability.scatter_add_(-1, column[rows, None], -held[rows, None].float())
            # masked_fill_ beside the product: the loss of an ignored token may be nan, and 0 * nan is nan.
            probability.mul_(scale).masked_fill_(scale == 0, 0.0)
            if logits.dtype != torch.float32:
                gradient[rows] = probability
        return gradient, None, None, None


def _less(part: Tensor, subtrahend: Tensor, room: Tensor) -> Tensor:
    """`part - subtrahend` in fp32: in `room` if that is fp32, else in new memory."""
    if part.dtype == torch.float32:
        return torch.sub(part, subtrahend, out=room)
    return part.float().sub_(subtrahend)


def _chunks(logits: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Consecutive rows, and which ones they are; one empty chunk if there are none."""
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    for first in range(0, max(1, logits.shape[0]), step):
        rows = slice(first, first + step)
        yield logits[rows], rows
