"""Finds users' code that changes gradients on their way through a model: hooks, and `autograd.Function`s.

A pipeline runs backward by microbatches, and before it knows what the loss is multiplied with. Code that limits gradients by
the norm of a batch would see that of a microbatch, and code that clamps them those of another scale. Both are measured at the
embeddings, of blocks that show what all do.

Extents: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hf_parallel.batches import take_rows
from hf_parallel.compat.private_torch import changes_backward
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.fewer import has_users_code
from hf_parallel.model.noise import without_noise
from hf_parallel.model.tensors import ROWS_AGREE
from hf_parallel.model.unchanged import frozen, in_mode, unchanged


OF_LABELS: Final = ("labels", "shift_labels", "num_items_in_batch")


class BackwardKind(NamedTuple):
    """Needs of users' code in backward passes, each with the reason; "" for what it does not need.

    Args:
        rows: Why it must see whole batches.
        scale: Why it must see the gradients of the loss as it is backpropagated.
    """

    rows: str = ""
    scale: str = ""


def judge_backward(model: nn.Module, sample: Mapping[str, Any]) -> BackwardKind:
    """Find out what users' code on a model needs of backward passes; nothing where only libraries' code runs.

    Args:
        model: The whole model, or some blocks of it that show what all do.
        sample: A tiny batch.
    """
    if not has_users_code(model):
        return BackwardKind()
    hooked = hooked_module(model)
    by_hook = f"a backward hook of {hooked} may need the gradients of a whole batch" if hooked else ""
    found = _measured(model, {name: value for name, value in sample.items() if name not in OF_LABELS})
    return found._replace(rows=by_hook or found.rows)


def hooked_module(model: nn.Module) -> str:
    """The first module with backward hooks of a user's; "" if there is none."""
    return next((name or "the model" for name, module in model.named_modules() if changes_backward(module)), "")


def _measured(model: nn.Module, batch: Mapping[str, Any]) -> BackwardKind:
    far = 4 if _dtype(model) == torch.float16 else 30
    try:
        # One that draws numbers in training would draw others for each row.
        first, second = (embedding_gradient(model, batch, seed=seed) for seed in (0, 1))
        trains = _agree(first, second, _tolerance(model))
        whole = {power: embedding_gradient(model, batch, 2.0**power, trains=trains) for power in (-far, 0, far)}
        adds_up = all(rows_add_up(model, batch, 2.0**power, trains=trains, whole=whole[power]) for power in (0, far))
    except Exception:  # noqa: BLE001  the model's own code, which may insist on labels, or on more rows
        return BackwardKind()
    plain = whole[0]
    scales = plain is None or all(_agree(one, plain * 2.0**power, _tolerance(model)) for power, one in whole.items())
    return BackwardKind(
        "" if adds_up else "code in its backward pass gives a row of a batch another gradient than the row alone",
        "" if scales else "code in its backward pass gives gradients that are not in proportion to that of the loss",
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _tolerance(model: nn.Module) -> float:
    return ROWS_AGREE.get(_dtype(model), 1e-4)


def rows_add_up(
    model: nn.Module, batch: Mapping[str, Any], scale: float = 1.0, *, trains: bool, whole: Tensor | None = None
) -> bool:
    """Whether the rows of a batch, one by one, give what they give together: `whole`, which is computed where it is not given."""
    whole = embedding_gradient(model, batch, scale, trains=trains) if whole is None else whole
    if whole is None:
        return True
    rows = len(whole)
    alone = [
        embedding_gradient(model, take_rows(batch, row, 1, rows), scale, trains=trains, row=row) for row in range(rows)
    ]
    return _agree(torch.cat([one for one in alone if one is not None]), whole, _tolerance(model))


def _agree(value: Tensor | None, reference: Tensor | None, tolerance: float) -> bool:
    if value is None or reference is None or value.shape != reference.shape:
        return value is reference
    both = [one.double().nan_to_num(0.0, 0.0, 0.0) for one in (value, reference)]
    return float((both[0] - both[1]).norm()) <= tolerance * float(both[1].norm())


def embedding_gradient(
    model: nn.Module, batch: Mapping[str, Any], scale: float = 1.0, *, trains: bool = True, row: int = 0, seed: int = 0
) -> Tensor | None:
    """The gradient f[B S H] at the first embeddings of a sum of logits f[B S V] with fixed weights.

    Parameters and what is kept of gradients stay as they are; the model is in training or in evaluation mode inside.

    Args:
        model: Model to run.
        batch: Its inputs, without labels.
        scale: Factor of the sum.
        trains: Whether modules are in training mode.
        row: Position of the first row in a larger batch, whose weight it has.
        seed: Seed of what the model draws.

    Returns:
        None if no embedding of tokens runs.
    """
    rows = len(next(value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1))
    leaves = list[Tensor]()

    def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if leaves or output.ndim != 3 or len(output) != rows:  # f[B S H] of tokens, not of positions
            return output
        leaves.append(output.detach().requires_grad_())
        return leaves[0].clone()  # which may be changed in place

    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    # Only the embeddings' outputs get a gradient: hooks on parameters do not run.
    with frozen(model), unchanged(model), NoDropout(), without_noise(model), torch.enable_grad():
        # First: hooks of users on an embedding come after it.
        handles = [each.register_forward_hook(cut, prepend=True) for each in embeddings]
        try:
            torch.manual_seed(seed)
            with in_mode(model, trains=trains):
                logits: Tensor = model(**batch).logits.float()
                if leaves:
                    (
                        logits * _weights(logits, row) * scale
                    ).sum().backward()  # not `grad`: reentrant checkpoints refuse it
        finally:
            for handle in handles:
                handle.remove()
    return leaves[0].grad if leaves else None


def _weights(logits: Tensor, first: int) -> Tensor:
    """Random numbers f[B S V], fixed for each row, whatever the other rows of its batch are."""
    seeds = [torch.Generator().manual_seed(first + index) for index in range(len(logits))]
    return torch.stack([torch.randn(logits.shape[1:], generator=seed) for seed in seeds]).to(logits.device)
