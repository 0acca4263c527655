"""Whether a piece of users' code gives rows of a batch the same beside other rows; tried on copies of what it was given.

Extents: B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from hf_parallel.model.tensors import ROWS_AGREE, map_tensors, tensors_in


OTHER: Final = 0.25  # what rows beside those of a microbatch are to them
LARGE: Final = 2.0**10

Code: TypeAlias = Callable[..., Any]
Given: TypeAlias = tuple[Any, ...]


class CannotTellError(Exception):
    """Code does not run with other tensors than its own."""


def call(code: Code, given: Given) -> Any:
    """Call code on copies of tensors, since it may write to them.

    Raises:
        CannotTellError: It raised something.
    """
    if any(isinstance(one, ModelOutput) for one in given):
        raise CannotTellError
    try:
        return code(*map_tensors(lambda _, tensor: tensor.clone(), given))
    except Exception as error:  # code of the user's, on tensors that they did not make
        raise CannotTellError from error


def rows_of(given: Any) -> int:
    """Rows of the first tensor of some."""
    return next((len(one) for one in floats_in(given) if one.ndim), 0)


def ignores_others(code: Code, given: Given, result: Any, rows: int) -> bool:
    """Whether code returns `result` for the first rows, too, if tensors of so many rows have as many others behind them."""
    return agree(call(code, _with_others(given, rows)), result, 1.0)


def _with_others(given: Given, rows: int) -> Given:

    def more(tensor: Tensor) -> Tensor:
        if not tensor.ndim or len(tensor) != rows:
            return tensor
        return torch.cat([tensor, OTHER * tensor if tensor.is_floating_point() else tensor])

    changed: Given = map_tensors(lambda _, tensor: more(tensor), given)
    return changed


def floats_in(given: Any) -> list[Tensor]:
    """Tensors that have gradients."""
    return [one for one in tensors_in(given) if one.is_floating_point()]


def agree(value: Any, reference: Any, scale: float) -> bool:
    """Whether the first rows of `value` are `reference` x `scale`."""
    pairs = list(zip(floats_in(value), floats_in(reference), strict=False))
    if len(pairs) != len(floats_in(reference)):
        return False
    for one, other in pairs:
        here = one[: len(other)] if other.ndim else one
        wanted = other.double() * scale
        error = (here.double() - wanted).norm() if here.shape == wanted.shape else torch.inf
        if not error <= ROWS_AGREE.get(other.dtype, 1e-4) * wanted.norm():
            return False
    return True
