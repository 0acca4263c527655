"""A forward that gives more than loss and logits, and a loss on what it gives; for tests of losses on other outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.utils.generic import ModelOutput


SCORED = "scored"


@dataclass
class Scored(ModelOutput):
    """Made of rows: all but the last three. One number of a batch: `spread`. Divided by what the batch has: `shared`."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    squashed: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mask: Tensor | None = None
    spread: Tensor | None = None
    shared: Tensor | None = None
    nothing: Tensor | None = None


def score(
    self: Any, *args: Any, labels: Any = None, scored: str = "", num_items_in_batch: Any = None, **kw: Any
) -> Any:
    """A forward on the instance that scores labels, when an argument asks for it; logits only if it asks for all."""
    if not scored:
        return self.plain(*args, labels=labels, num_items_in_batch=num_items_in_batch, **kw)
    every_logit = self.plain(*args, **kw).logits
    logits = every_logit[:, :-1].float()
    mask = labels[:, 1:] != -100
    every = functional.log_softmax(logits, -1)
    log_probs = every.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0.0)
    entropy = -(every.exp() * every).sum(-1).masked_fill(~mask, 0.0)
    count = mask.sum() if num_items_in_batch is None else num_items_in_batch
    return Scored(
        loss=-log_probs.sum() / count,
        logits=every_logit if scored == "all" else None,
        squashed=every_logit.tanh() if scored == "all" else None,
        log_probs=log_probs,
        entropy=entropy,
        mask=mask,
        spread=log_probs.std(),
        shared=log_probs / log_probs.abs().sum(),
    )


def scoring(build: Callable[[], Any]) -> Any:
    model = build()
    model.plain = model.forward
    model.forward = MethodType(score, model)
    return model


def pairs(model: Any, batch: Any) -> Tensor:
    """Rows of one half against the other, as of preferences."""
    output = model(**batch, scored=SCORED)
    first, second = output.log_probs.sum(1).chunk(2)
    return -functional.logsigmoid(0.1 * (first - second)).mean()
