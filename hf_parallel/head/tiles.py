"""Cross-entropy of a linear head from hidden states: logits exist for a few tokens at a time.

The gradients are made in the forward pass, tile by tile, while the logits of a tile are at hand: the head's product is
computed once, as without tiles. What is kept for the backward pass are those gradients, f[N H] and f[V H], in place of the
logits f[N V]. Where another loss of the same head waits for its backward pass (a schedule with several microbatches in
flight), nothing is kept, and the backward pass makes the tiles again: gradients of the weight are not held twice.

torch 2.13 has `linear_cross_entropy`, which does the same for a head without soft-cap and on one rank; it can take over
there when the oldest supported torch has it.

Extents: N tokens, n of a tile, H hidden, V vocabulary (of one rank, where ranks share it).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_parallel.head.rows import rows_of_tile


COLUMNS = 2**14  # of the vocabulary, whose weight gradient is rounded to half precision before it is added up
FP16_SCALE = 2.0**10  # of gradients of logits, most of which would be 0 in fp16

Step: TypeAlias = Callable[[Tensor], Tensor]  # elementwise


class Columns(Protocol):
    """The vocabulary that ranks share."""

    @property
    def start(self) -> int:
        """First token of this rank."""

    @property
    def most(self) -> int:
        """Tokens of the rank with most: tiles are as many on every rank, so they follow this one."""

    def merged(self, top: Tensor, total: Tensor, picked: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Log of the sum of all exponentials, and the logit of the label, f32[n] each, of the whole vocabulary.

        Collective over the ranks; the logit is nan if no rank has the label.

        Args:
            top: f32[n], largest logit of this rank.
            total: f32[n], sum of its exp(logit - top).
            picked: f32[n], logit of the label where it is held.
            held: b[n], whether the label is one of this rank's.
        """


class _Gradients(NamedTuple):
    """Gradients of the summed loss with respect to hidden states, weight and bias; None where none is wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _Found(NamedTuple):
    """Results over all tokens: sum of losses, f32[N] logs of the sums of exponentials, and the gradients wanted."""

    loss: Tensor
    log_sum: Tensor
    gradients: _Gradients


class _Kept:
    """Gradients that wait for their backward pass."""

    def __init__(self, gradients: _Gradients) -> None:
        self.gradients: _Gradients | None = gradients


@dataclass
class Tiling:
    """Sizes of the tiles in which the losses of one head are computed.

    Args:
        rows: Tokens of a tile; 0 for `rows_of_tile`.
        columns: The part of the vocabulary that the weight is of; None for all of it.
    """

    rows: int = 0
    columns: Columns | None = None
    _waiting: weakref.ref[_Kept] | None = field(default=None, repr=False)

    def rows_of(self, tokens: int, hidden: int, vocabulary: int) -> int:
        """Tokens of a tile, the same on all ranks that share a vocabulary.

        Args:
            tokens: Tokens of the microbatch.
            hidden: Width of the hidden states.
            vocabulary: This rank's part.
        """
        return self.rows or rows_of_tile(tokens, hidden, vocabulary if self.columns is None else self.columns.most)

    def waits(self) -> bool:
        """Whether the weight gradient of a loss is kept for its backward pass."""
        kept = self._waiting() if self._waiting is not None else None
        return kept is not None and kept.gradients is not None

    def keep(self, gradients: _Gradients) -> _Kept:
        """Keep gradients; those of a weight are noticed."""
        kept = _Kept(gradients)
        if gradients.weight is not None:
            self._waiting = weakref.ref(kept)
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Tiling:
        """Tiling for a copy of the head: nothing waits; the ranks are the same."""
        return Tiling(self.rows, self.columns)

    def __reduce__(self) -> Any:
        return Tiling, (self.rows, self.columns)


@dataclass(frozen=True)
class Head:
    """A head: turns hidden states f[... H] into logits f[... V].

    Args:
        weight: p[V H].
        bias: p[V] or None.
        dtype: Dtype in which the product is made.
        steps: Steps that are applied to its elements, one after the other.
        tiling: Tiling of its losses.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    steps: tuple[Step, ...]
    tiling: Tiling

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f[... V] of `hidden`, f[... H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            out = F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)
            for step in self.steps:
                out = step(out)
        return out


def tiled_loss(hidden: Tensor, head: Head, targets: Tensor, ignored: int) -> Tensor:
    """Sum of the cross-entropies of all tokens that count, f32[] (f64[] of f64 logits).

    Args:
        hidden: f[N H].
        head: Makes their logits.
        targets: i[N], tokens of the whole vocabulary.
        ignored: Target of tokens that do not count.
    """
    result: Tensor = _TiledLoss.apply(hidden, head.weight, head.bias, targets, ignored, head)  # type: ignore[no-untyped-call]
    return result


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignored: int, head: Head
    ) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        if wanted[1] and head.tiling.waits():
            wanted = (False, False, False)
        found = _sum((hidden, weight, bias), targets, ignored, head, wanted)
        # The sums of exponentials, so that ranks that share the vocabulary need not merge them again.
        ctx.save_for_backward(hidden, weight, bias, targets, found.log_sum)
        ctx.head, ctx.ignored = head, ignored
        ctx.kept = head.tiling.keep(found.gradients) if any(wanted) else None
        return found.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        kept: _Kept | None = ctx.kept
        gradients = kept.gradients if kept is not None else None
        if gradients is None:  # kept by another loss at the time, or taken by an earlier backward pass of this graph
            wanted = tuple(ctx.needs_input_grad[:3])
            gradients = _sum((hidden, weight, bias), targets, ctx.ignored, ctx.head, wanted, log_sum).gradients
        if kept is not None:
            kept.gradients = None
        # As of torch's own: where no token counts the gradients are 0, whatever the loss was divided by.
        factor = torch.where((targets != ctx.ignored).any(), grads[0], 0.0)
        scaled = [
            None if made is None else made.to(of.dtype).mul_(factor)
            for made, of in zip(gradients, (hidden, weight, bias), strict=True)
        ]
        return *scaled, None, None, None


def _sum(
    given: tuple[Tensor, Tensor, Tensor | None],
    targets: Tensor,
    ignored: int,
    head: Head,
    wanted: Sequence[bool],
    known: Tensor | None = None,
) -> _Found:
    """The losses and the gradients that are `wanted`.

    Args:
        given: Hidden states f[N H], weight, bias.
        targets: i[N].
        ignored: Target of tokens that do not count.
        head: Its product and steps.
        wanted: Gradients of which of the `given`.
        known: f32[N], logs of the sums of exponentials, where they were found before.
    """
    hidden, weight, bias = given
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.to(head.dtype)
        added = None if bias is None else bias.to(head.dtype)
        to_hidden = torch.empty_like(hidden, dtype=head.dtype) if wanted[0] else None
        to_weight, to_bias = _Sum(weight, head.dtype), _Sum(bias, head.dtype)
        scale = FP16_SCALE if head.dtype == torch.float16 else 1.0
        losses, log_sums = [], []
        for rows in _tiles(hidden, weight, head.tiling):
            part = hidden[rows].to(head.dtype)  # (tile, hidden)
            tile = _Tile(F.linear(part, matrix, added), head, targets[rows], ignored, takes_gradient=any(wanted))
            loss, log_sum = tile.loss(None if known is None else known[rows])
            losses.append(loss)
            log_sums.append(log_sum)
            gradient = tile.gradient(log_sum, scale) if any(wanted) else part
            del tile  # nothing of it is needed any more
            if to_hidden is not None:
                to_hidden[rows] = gradient @ matrix
            if wanted[1]:
                to_weight.add_product(gradient, part)
            if wanted[2]:
                to_bias.add(gradient.sum(0, dtype=to_bias.dtype))
            del gradient  # before there is another tile
        if to_hidden is not None and scale != 1.0:
            to_hidden = to_hidden.float().div_(scale)
        gradients = _Gradients(to_hidden, to_weight.total(scale), to_bias.total(scale))
        return _Found(torch.stack(losses).sum(), torch.cat(log_sums), gradients)


def _tiles(hidden: Tensor, weight: Tensor, tiling: Tiling) -> Iterator[slice]:
    """Rows of each tile; one empty tile if there are none."""
    tokens = hidden.shape[0]
    step = tiling.rows_of(tokens, hidden.shape[-1], weight.shape[0])
    for first in range(0, max(1, tokens), step):
        yield slice(first, first + step)


class _Tile:
    """Logits of some tokens.

    Args:
        raw: The product f[n V]; its memory is used.
        head: Head that is applied to it.
        targets: i[n].
        ignored: Target of tokens that do not count.
        takes_gradient: Whether its gradient will be asked for.
    """

    def __init__(self, raw: Tensor, head: Head, targets: Tensor, ignored: int, *, takes_gradient: bool) -> None:
        with torch.set_grad_enabled(takes_gradient and bool(head.steps)):
            self._leaf = self._logits = raw.requires_grad_(torch.is_grad_enabled())
            for step in head.steps:
                self._logits = step(self._logits)
        detached = self._logits.detach()
        self._scores = detached if detached.dtype.itemsize >= 4 else detached.float()
        self._head, columns = head, head.tiling.columns
        self._counts = targets != ignored  # (tile,), as all below but scores
        column = torch.where(self._counts, targets, 0) - (columns.start if columns is not None else 0)
        self._held = self._counts
        if columns is not None:
            self._held = self._counts & (column >= 0) & (column < raw.shape[-1])
            column = torch.where(self._held, column, 0)
        self._column = column[:, None]

    def loss(self, known: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum of losses, and of each token the log of the sum of exponentials, which may be `known`.

        Afterwards the tile has the exponentials of its logits, less the largest or that log.
        """
        scores, columns = self._scores, self._head.tiling.columns
        picked = scores.gather(-1, self._column).squeeze(-1)
        self._less = known if known is not None else scores.amax(-1)
        # The product itself is not needed again; steps may have kept what they were given for their gradients.
        room = None if self._head.steps else scores
        self._scores = torch.sub(scores, self._less[:, None], out=room).exp_()  # (tile, vocab)
        if known is not None:
            log_sum = known
        elif columns is None:
            log_sum = self._scores.sum(-1).log() + self._less
        else:
            log_sum, picked = columns.merged(self._less, self._scores.sum(-1), picked, self._held)
        return (log_sum - picked).masked_fill(~self._counts, 0.0).sum(), log_sum

    def gradient(self, log_sum: Tensor, scale: float) -> Tensor:
        """`scale` times the gradient f[n V] of the sum with respect to the product; call `loss` before."""
        factor = ((self._less - log_sum).exp() * scale).masked_fill_(~self._counts, 0.0)
        found = self._scores.mul_(factor[:, None])  # scaled probabilities
        found.scatter_add_(-1, self._column, self._held[:, None].to(found.dtype).mul_(-scale))
        if self._head.steps:
            (found,) = torch.autograd.grad(self._logits, self._leaf, found.to(self._logits.dtype))
        return found.to(self._head.dtype)


class _Sum:
    """The gradient of a parameter, added up over tiles: in fp32, if not in fp64.

    Args:
        of: The parameter; None if there is none.
        dtype: Dtype of the products.
    """

    def __init__(self, of: Tensor | None, dtype: torch.dtype) -> None:
        self._shape = None if of is None else of.shape
        self.dtype = torch.float32 if dtype.itemsize < 4 else dtype
        self._total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a gradient; its memory may be kept."""
        self._total = part if self._total is None else self._total.add_(part)

    def add_product(self, gradient: Tensor, part: Tensor) -> None:
        """Add `gradient.T @ part`, f[V H] of f[n V] and f[n H]."""
        if gradient.dtype == self.dtype:
            self._total = gradient.t() @ part if self._total is None else self._total.addmm_(gradient.t(), part)
            return
        if self._total is None:
            self._total = torch.zeros(gradient.shape[-1], part.shape[-1], dtype=self.dtype, device=part.device)
        for first in range(0, gradient.shape[-1], COLUMNS):
            some = slice(first, first + COLUMNS)
            self._total[some] += gradient[:, some].t() @ part

    def total(self, scale: float) -> Tensor | None:
        """The sum, divided by `scale`."""
        return self._total if self._total is None or scale == 1.0 else self._total.div_(scale)
