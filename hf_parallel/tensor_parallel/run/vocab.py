"""Embedding and head sharded over the vocabulary, and the loss that works on the head's local output.

In training with labels the logits of a model never exist as a whole: the head leaves its output local, the model's own
code after it works on the part, and the model's `loss_function` is one that communicates. In every other call
(evaluation, no labels, a loss function that somebody put over ours) the head gathers its output and the model's own
loss runs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from hf_parallel.compat.private_peft import base_model
from hf_parallel.compat.private_transformers import is_causal_loss
from hf_parallel.errors import PlanError
from hf_parallel.head.defer import LogitsDeferral, made
from hf_parallel.head.labelled import LabelledOutput
from hf_parallel.head.tiles import Tiling
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import SharedCopy, gather_from_tp, reduce_from_tp
from hf_parallel.tensor_parallel.run.vocab_loss import SharedColumns, vocab_parallel_loss
from hf_parallel.tensor_parallel.run.vocab_watch import LogitsWatch, VocabMode, on_all


logger = logging.getLogger(__name__)


@dataclass
class _EmbeddingState:
    """Rows of the vocabulary that this rank has; kept on the module as `tp_embedding`."""

    copy: SharedCopy
    start: int
    length: int


@dataclass
class VocabLoss:
    """A model's `loss_function`: over local logits in local mode, else the function that it had.

    Args:
        copy: For the group.
        mode: The model's.
        start: First token of this rank.
        whole: The function to call on whole logits.
    """

    copy: SharedCopy
    mode: VocabMode
    start: int
    whole: Callable[..., Tensor]

    def __call__(self, logits: Tensor, labels: Tensor | None = None, vocab_size: Any = None, **kwargs: Any) -> Tensor:
        """The loss; `vocab_size` is that of the full model and of no use on a part."""
        if not self.mode.local:
            return self.whole(logits, labels, vocab_size, **kwargs)
        known = ("num_items_in_batch", "ignore_index", "shift_labels")
        chosen = {name: kwargs[name] for name in known if name in kwargs}
        with self.mode.losing():
            return vocab_parallel_loss(logits, labels, self.copy.group, self.start, **chosen)


def install_embedding(module: nn.Module, shared: SharedCopy, start: int, length: int) -> None:
    """Make an embedding whose weight is rows [start, start + length) look up any token. In place."""
    put_over(module, "tp_embedding", _EmbeddingState(shared, start, length), _embedding_forward)


def install_loss(
    model: nn.Module, head: nn.Module, shared: SharedCopy, start: int, most: int, *, defers_logits: bool
) -> None:
    """Give head and loss of a model their common mode, and `model.forward` what switches it. In place.

    Args:
        model: Without adapters around it.
        head: Its head, which has the columns from `start` on.
        shared: For the group.
        start: First token of this rank.
        most: Tokens of the rank with most.
        defers_logits: Whether the head leaves its part of the logits unmade.
    """
    if defers_logits:
        vars(head)["logits_deferral"] = LogitsDeferral(Tiling(columns=SharedColumns(shared.group, start, most)))
    mode = vars(model)["tp_vocab"] = vars(head)["tp_vocab"] = VocabMode()
    whole: Any = model.loss_function
    loss = vars(model)["tp_vocab_loss"] = VocabLoss(shared, mode, start, whole)
    vars(model)["tp_vocab_head"] = head
    model.loss_function = loss  # type: ignore[assignment]  # transformers has a setter
    vars(model)["tp_model_forward"] = model.forward
    vars(model)["forward"] = MethodType(_like(model.forward), model)


def labelled(model: nn.Module, forward: Callable[..., Any], *, hides_logits: bool) -> Callable[..., Any]:
    """`forward` of a model whose loss will be, or is, installed: local logits in training with labels.

    Args:
        model: The model; its mode is looked up at each call, so it may be installed later.
        forward: The model's genuine forward.
        hides_logits: Return `LabelledOutput` there. False for a caller that knows what the logits are.

    Returns:
        A function with the signature of `forward`.
    """
    inner = base_model(model)
    if (
        inner is not model
    ):  # the forward of a PEFT model calls that of its base model, which the loss will be installed on
        vars(inner)["tp_hides_logits"] = hides_logits
        return forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_labelled(model, forward, args, kwargs, hides_logits)

    return run


def rows_of(forward: Callable[[Tensor], Tensor], module: nn.Module, tokens: Tensor, start: int, length: int) -> Tensor:
    """Contribution of a rank with rows [start, start + length) of an embedding to its output f[... H].

    Args:
        forward: The embedding's own forward with this rank's weight; it may scale.
        module: The embedding; its `padding_idx` is shifted for the call.
        tokens: i[...], of the full vocabulary.
        start: First token of this rank.
        length: Number of tokens of this rank.
    """
    held = (tokens >= start) & (tokens < start + length)
    padding = vars(module).get("padding_idx")
    try:
        inside = padding is not None and start <= padding < start + length
        vars(module)["padding_idx"] = padding - start if inside and padding is not None else None
        rows = forward(torch.where(held, tokens - start, 0))
    finally:
        vars(module)["padding_idx"] = padding
    return rows.masked_fill(~held.unsqueeze(-1), 0.0)


def _embedding_forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    state: _EmbeddingState = self.tp_embedding
    tokens = args[0] if args else next(iter(named.values()))
    rows = rows_of(self.tp_embedding_inner, self, tokens, state.start, state.length)
    return reduce_from_tp(rows, state.copy.group)


def _like(forward: Callable[..., Any]) -> Any:
    """`_labelled_forward` with the parameters of `forward`: a Trainer looks for them in the model under the adapters."""
    made: Any = FunctionType(_labelled_forward.__code__, _labelled_forward.__globals__, "forward")
    signature = inspect.signature(forward)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    made.__signature__ = signature.replace(parameters=[owner, *signature.parameters.values()])
    return made


def _labelled_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run_labelled(self, self.tp_model_forward, args, kwargs, vars(self).get("tp_hides_logits", True))


def _run_labelled(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hides: bool
) -> Any:
    mode: VocabMode | None = vars(model).get("tp_vocab")
    given = _given(forward, args, kwargs)
    if mode is None or not (model.training and torch.is_grad_enabled() and _wants_loss(model, given)):
        return forward(*args, **kwargs)
    if not _is_ours(model, mode):
        return forward(*args, **kwargs)
    names = frozenset(name for name, value in given.items() if value is not None)
    if not mode.fits.get(names, True):
        return forward(*args, **kwargs)
    if names in mode.fits:
        with mode.running():
            output = forward(*args, **kwargs)
        if mode.is_balanced:
            return _without_logits(model, output) if hides else output
        mode.fits[names] = False  # somebody has put another loss in place since
        _refuse_part(model, names, hides)
        return forward(*args, **kwargs)
    return _first_call(model, forward, args, kwargs, names, hides)


def _first_call(
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: frozenset[str],
    hides: bool,
) -> Any:
    """A forward with arguments that were not seen before: it must use local logits as planned, or gets whole ones."""
    mode: VocabMode = vars(model)["tp_vocab"]
    loss: VocabLoss = vars(model)["tp_vocab_loss"]
    device = next(model.parameters()).device
    before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    mode.watch, error, output = LogitsWatch(), None, None
    try:
        with mode.running(), mode.watch:
            output = forward(*args, **kwargs)
        fits = mode.is_balanced and not mode.watch.strays(output)
    except Exception as failed:  # the model's own code, on a part of the logits: may raise anything
        if not mode.heads:
            raise
        error, fits = failed, False
    except BaseException:  # a stage of a pipeline that ends before the head
        mode.fits[names] = True
        raise
    finally:
        mode.watch = None
    mode.fits[names] = on_all(fits, device, loss.copy.group) if mode.heads else True
    if mode.fits[names]:
        return _without_logits(model, output) if hides else output
    _refuse_part(model, names, hides, error)
    torch.set_rng_state(before[0])
    if before[1] is not None:
        torch.cuda.set_rng_state(before[1], device)
    return forward(*args, **kwargs)


def _is_ours(model: nn.Module, mode: VocabMode) -> bool:
    """Whether the model's loss function is still the one that works on parts, in place of transformers' own."""
    loss = getattr(model, "loss_function", None)
    if isinstance(loss, VocabLoss) and loss.mode is mode and is_causal_loss(loss.whole):
        return True
    if not mode.warned:
        mode.warned = True
        logger.warning(
            "hf_parallel: the loss function of %s was replaced after its head was sharded over the vocabulary, so the "
            "logits are gathered for it in every forward.",
            type(model).__name__,
        )
    return False


def _refuse_part(model: nn.Module, names: frozenset[str], hides: bool, error: Exception | None = None) -> None:
    """Say that the head is gathered for such calls; a stage of a pipeline cannot run again for it."""
    text = (
        f"with the arguments {', '.join(sorted(names))} the forward of {type(model).__name__} does more with the logits in "
        "training than to pass them to model.loss_function once, so they cannot be parts of the vocabulary"
    )
    if not hides:
        raise PlanError(f"{text}. Set tensor_parallel.vocab_parallel_loss: false.") from error
    loss: VocabLoss = vars(model)["tp_vocab_loss"]
    if loss.copy.group.rank() == 0:
        logger.warning("hf_parallel: %s: they are gathered.", text)


def _given(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    return {**(inspect.signature(forward).bind_partial(*args, **kwargs).arguments if args else {}), **kwargs}


def _wants_loss(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call gives labels; a tuple, whose second item are the logits, is returned whole."""
    as_mapping = given.get("return_dict")
    if as_mapping is None:
        as_mapping = getattr(getattr(model, "config", None), "return_dict", True)
    return given.get("labels") is not None and as_mapping is not False


def _without_logits(model: nn.Module, output: Any) -> Any:
    if not isinstance(output, ModelOutput) or output.get("logits") is None:
        return output
    group, sizes = vars(model)["tp_vocab_loss"].copy.group, vars(model)["tp_vocab_head"].tp_linear.gather_sizes
    return LabelledOutput().hide(output, lambda local: gather_from_tp(made(local), group, sizes))
