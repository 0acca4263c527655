"""Finds out how a model's own loss may be computed by microbatches, by watching which functions make it.

What is accepted is accepted for the functions that were called, not for the numbers that came out: a loss that weighs
one special token gives the numbers of a plain one wherever that token does not occur. A loss that is not known is
computed on whole batches, which is always right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.batches import IGNORED_LABEL, count_targets, take_rows
from hf_parallel.compat.private_torch import is_cross_entropy, version_of
from hf_parallel.compat.private_transformers import loss_shifts_labels
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.noise import without_noise
from hf_parallel.model.tensors import ROWS_AGREE
from hf_parallel.model.unchanged import unchanged
from hf_parallel.model.value_reads import ValueReads
from hf_parallel.pipeline_parallel.plan.backward_kind import OF_LABELS, rows_add_up
from hf_parallel.pipeline_parallel.plan.verify_stages import loss_of


LossKind: TypeAlias = Literal["sum_over_items", "sum_and_extra", "mean", "whole"]

COUNT = 1009.0  # a number of items that no batch of a probe has
# Functions whose result has the labels that they were given, in another place, shape or type.
KEEPS_LABELS = frozenset(
    {
        "pad",
        "__getitem__",
        "contiguous",
        "view",
        "reshape",
        "flatten",
        "ravel",
        "to",
        "long",
        "clone",
        "detach",
        "narrow",
    }
    | {"squeeze", "unsqueeze", "cpu", "cuda"}
)
KEEPS_SCALAR = frozenset({"to", "float", "clone", "contiguous", "double"})
DIVIDES = frozenset({"div", "divide", "true_divide", "__truediv__"})
MULTIPLIES = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


class Verdict(NamedTuple):
    """The way in which a loss may be computed, and the reason why not by microbatches."""

    kind: LossKind
    why: str = ""


class _UnknownError(Exception):
    """A loss that is not known to be a sum or a mean over labels; the message says why."""


@dataclass(frozen=True)
class _Made:
    """A scalar that comes from one cross-entropy.

    Args:
        form: "mean" or "sum" over the labels, or "items": the sum divided by the number of items.
        targets: Number of labels that counted.
        value: Its value when it was made.
        added: Tensors that were added to it since, by identity.
    """

    form: Literal["mean", "sum", "items"]
    targets: int
    value: float
    added: tuple[int, ...] = ()


class _Watch(TorchFunctionMode):
    """Follows labels into cross-entropies, and those into the loss.

    Args:
        labels: The labels that the model is called with.
        count: The number of items that it is called with, None without.
    """

    def __init__(self, labels: list[Tensor], count: Tensor | None) -> None:
        super().__init__()
        self._alive: list[Any] = list(labels)  # an identity is taken again when its object is gone
        self._labels = {id(tensor) for tensor in labels}
        self._versions = [(tensor, version_of(tensor)) for tensor in labels]
        self._count = None if count is None else float(count)
        self.made: dict[int, _Made] = {}
        self._kept: set[int] = set()  # whether a label counts, and how many do
        self._times: dict[int, int] = {}  # a product with a number -> the other factor
        self._reads = ValueReads(labels)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self.made.get(id(args[0])) if args else None
        out = self._reads.note(func, (args, kwargs), func(*args, **kwargs))
        if isinstance(out, Tensor):
            self._note(func, args, kwargs, out, before)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Tensor, before: _Made | None) -> None:
        name = getattr(func, "__name__", "")
        if is_cross_entropy(func):
            made = self._cross_entropy(func, args, kwargs, out)
        elif name in KEEPS_LABELS and args and id(args[0]) in self._labels:
            others = [*args[1:], *kwargs.values()]
            made = None
            if not any(isinstance(leaf, Tensor) for other in others for leaf in _flat(other)):
                self._labels.add(id(out))
                self._versions.append((out, version_of(out)))
                self._alive.append(out)
        elif self._counts(name, args):
            self._kept.add(id(out))
            self._alive.append(out)
            made = None
        else:
            made = self._arithmetic(name, args, out, before)
        if made is not None:
            self.made[id(out)] = made
            self._alive.append(out)

    def _cross_entropy(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> _Made | None:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        how = given.arguments
        plain = how["weight"] is None and how["size_average"] is None and how["reduce"] is None
        if not plain or how["ignore_index"] != IGNORED_LABEL or how["reduction"] not in ("mean", "sum"):
            return None
        if id(how["target"]) not in self._labels or how["target"].is_floating_point():
            return None
        return _Made(how["reduction"], int(how["target"].ne(IGNORED_LABEL).sum()), float(out))

    def _counts(self, name: str, args: Any) -> bool:
        if name in ("ne", "__ne__"):
            return (
                len(args) == 2
                and id(args[0]) in self._labels
                and isinstance(args[1], int)
                and args[1] == IGNORED_LABEL
            )
        return name == "sum" and len(args) == 1 and id(args[0]) in self._kept

    def _arithmetic(self, name: str, args: Any, out: Tensor, before: _Made | None) -> _Made | None:
        first, second = (*args, None, None)[:2]
        if name in DIVIDES and before is not None and before.form == "sum" and not before.added:
            if id(second) in self._kept and not second.ndim and int(second) == before.targets:
                return replace(before, form="mean", value=float(out))
            divided = self._count is not None and second is not None and float(second) == self._count
            return replace(before, form="items", value=float(out)) if divided else None
        if name in ADDS and len(args) == 2:
            base, extra = (first, second) if before is not None else (second, first)
            known = before if before is not None else self.made.get(id(base))
            if known is None or not isinstance(extra, Tensor):
                return None
            self._alive.append(extra)
            return replace(known, added=(*known.added, id(extra)))
        if name in MULTIPLIES and isinstance(second, (int, float)):
            self._times[id(out)] = id(first)
            self._alive += [first, out]
        if name in KEEPS_SCALAR and not out.ndim:
            self._alive += [first, out]
            if before is not None:
                return before
            if out is not first:
                self._times[id(out)] = id(first)
        return None

    def judge(self, loss: Tensor, extra: Tensor | None, expected: int) -> _Made:
        """Find out how `loss` was made.

        Args:
            loss: Loss that the model returned.
            extra: A term that it returned too and may have added, times a number: the auxiliary loss of a router.
            expected: Number of labels of the batch that count.

        Raises:
            _UnknownError: In another way than as a sum or mean over the labels of the batch.
        """
        made = self.made.get(id(loss))
        if made is None or made.form == "sum":
            raise _UnknownError("it is not made by one unweighted cross-entropy over the labels")
        if self._reads.found:
            raise _UnknownError(
                "its code reads values of the labels or of the loss, or compares how many rows they have, by which it may go on in another way"
            )
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise _UnknownError("its forward writes to the labels")
        if made.targets != expected:
            raise _UnknownError(f"it is over {made.targets} labels where {expected} were given")
        for number in made.added:
            while number in self._times and number != id(extra):
                number = self._times[number]
            if number != id(extra):
                raise _UnknownError("something is added to the cross-entropy")
        if not made.added and float(loss) != made.value:
            raise _UnknownError("the cross-entropy is changed after it is made")
        return made


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def judge_loss(model: nn.Module, sample: Mapping[str, Any]) -> Verdict:
    """Find out how the model's own loss may be computed, by calling it: as in training, as in evaluation, row by row.

    Args:
        model: The whole model, not cut.
        sample: A tiny batch with labels.

    Returns:
        "sum_over_items": microbatch losses computed with the global item count add up to the batch's loss.
        "sum_and_extra": so they do, but for a router's auxiliary loss, which must be averaged.
        "mean": the model averages over the labels it sees; the caller must weight microbatches by their number.
        "whole": none of these; the loss needs the whole batch.
    """
    if not isinstance(sample.get("labels"), Tensor):
        return Verdict("whole", "the sample has no labels")
    accepted = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    takes_count = takes_any or "num_items_in_batch" in accepted
    found: list[_Made] = []
    try:
        for trains in (False, True):
            for counted in (False, True) if takes_count else (False,):
                try:
                    found.append(_watched(model, sample, trains=trains, counted=counted))
                except _UnknownError:
                    raise
                except Exception as error:  # the model's own code
                    if not trains:  # a model may refuse to train while its modules do not
                        raise _UnknownError(
                            f"a small batch with ignored labels raises {type(error).__name__}"
                        ) from error
        _compare_rows(model, sample, found[0])
        with _zeros_filled(model) as filled:
            if filled:
                _compare_gradients(model, sample)
    except _UnknownError as unknown:
        return Verdict("whole", str(unknown))
    return _verdict(found, takes_count)


def _verdict(found: list[_Made], takes_count: bool) -> Verdict:
    without = found[::2] if takes_count else found
    counted = found[1::2] if takes_count else []
    if any(made.form != "mean" for made in without) or len({bool(made.added) for made in found}) > 1:
        return Verdict("whole", "training and evaluation, or calls with and without num_items_in_batch, differ")
    forms = {made.form for made in counted}
    if forms == {"items"}:
        return Verdict("sum_and_extra" if found[0].added else "sum_over_items")
    if forms <= {"mean"} and not found[0].added:
        return Verdict("mean")
    return Verdict("whole", "something is added to the cross-entropy")


def _watched(model: nn.Module, sample: Mapping[str, Any], *, trains: bool, counted: bool) -> _Made:
    given = dict(sample)
    names = [name for name in ("labels", "shift_labels") if isinstance(sample.get(name), Tensor)]
    labels = [sample[name].clone() for name in names]
    given.update(zip(names, labels, strict=True))
    count = torch.tensor(COUNT, device=labels[0].device) if counted and labels else None
    if count is not None:
        given["num_items_in_batch"] = count
    expected = int(count_targets(given, loss_shifts_labels(model)))
    watch = _Watch(labels, count)
    with unchanged(model), NoDropout(), without_noise(model), torch.no_grad(), _training(model, trains):
        torch.manual_seed(0)
        with watch:
            output = model(**given)
        extra = output.get("aux_loss") if isinstance(output, Mapping) else None
        return watch.judge(loss_of(output), extra, expected)


@contextmanager
def _training(model: nn.Module, trains: bool) -> Iterator[None]:
    """Inside, the model alone, not its modules, is in training or evaluation mode."""
    before = model.training
    model.training = trains
    try:
        yield
    finally:
        model.training = before


@contextmanager
def _zeros_filled(model: nn.Module) -> Iterator[bool]:
    """Inside, trained tensors that are zero throughout are random; gives whether there are any.

    The last factor of a new adapter is zero, and hides from the loss, though not from the gradients, what comes before it.
    """
    generator, kept = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for tensor in model.parameters():
            if not (tensor.requires_grad and tensor.is_floating_point() and tensor.numel()) or tensor.is_meta:
                continue
            if bool(tensor[(0,) * tensor.ndim] == 0) and not bool(tensor.any()):
                kept.append((tensor, tensor.detach().clone()))
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (1.0 if tensor.ndim > 1 else 0.1))
    try:
        yield bool(kept)
    finally:
        with torch.no_grad():
            for tensor, values in kept:
                tensor.copy_(values)


def _compare_gradients(model: nn.Module, sample: Mapping[str, Any]) -> None:
    plain = {name: value for name, value in sample.items() if name not in OF_LABELS}
    try:
        adds_up = rows_add_up(model, plain, trains=False)
    except Exception as error:  # the model's own code
        raise _UnknownError(f"gradients of a small batch in evaluation mode raise {type(error).__name__}") from error
    if not adds_up:
        raise _UnknownError("the logits of a row depend on the other rows of its batch")


def _compare_rows(model: nn.Module, sample: Mapping[str, Any], whole: _Made) -> None:
    """Check that the rows of the sample, one by one, give what they give together."""
    labels = sample["labels"]
    rows = labels.shape[0]
    if rows < 2:
        return
    total = 0.0
    for row in range(rows):
        one = take_rows(sample, row, 1, rows)
        if count := int(count_targets(one, loss_shifts_labels(model))):
            try:
                total += _watched(model, one, trains=False, counted=False).value * count
            except _UnknownError:
                raise
            except Exception as error:
                raise _UnknownError(f"a row alone raises {type(error).__name__}") from error
    mean = total / max(whole.targets, 1)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if abs(mean - whole.value) > ROWS_AGREE.get(dtype, 1e-4) * max(1.0, abs(whole.value)):
        raise _UnknownError(f"rows give {mean:.6g} one by one and {whole.value:.6g} together")
