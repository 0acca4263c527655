"""Sums and norms along one dim of a sharded gradient: numbers for each row of the whole, which fit no rows of this rank's part.

Clipping by units (timm's `adaptive_clip_grad`) puts them beside norms of the rows of a weight, which in a loop of users is a shard.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_parallel.compat.private_torch import no_torch_function
from hf_parallel.compat.torch_tools import pytree
from hf_parallel.errors import UnsupportedError


class OfWhole(torch.Tensor):
    """An ordinary tensor with a number for each row (or column) of a whole gradient."""

    parameter_name: str

    @staticmethod
    def of(values: Tensor, name: str) -> OfWhole:
        """`values`, in the same memory.

        Args:
            values: Made of the whole gradient.
            name: The parameter's name.
        """
        with no_torch_function():
            made: OfWhole = values.as_subclass(OfWhole)
        made.parameter_name = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any function on ordinary tensors; what has the same shape is again of the whole.

        Raises:
            UnsupportedError: Torch cannot put the whole's rows beside those of something else.
        """
        given: list[OfWhole] = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, OfWhole)]
        here = ordinary((args, kwargs or {}))
        with no_torch_function():
            shape = given[0].shape
        try:
            out = func(*here[0], **here[1])
        except RuntimeError as error:
            if isinstance(error, UnsupportedError) or "size" not in str(error):
                raise
            _refuse_unlike(given[0], error)
        return pytree.tree_map(
            lambda leaf: (
                OfWhole.of(leaf, given[0].parameter_name) if type(leaf) is Tensor and leaf.shape == shape else leaf
            ),
            out,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ordinary(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = ordinary(self).clone()
        return copied


def ordinary(tree: Any) -> Any:
    """A tree of arguments with ordinary tensors in place of those that are of a whole gradient."""
    with no_torch_function():
        return pytree.tree_map_only(OfWhole, lambda leaf: leaf.as_subclass(Tensor), tree)


def _refuse_unlike(given: OfWhole, error: Exception) -> NoReturn:
    """Refuse a function that torch cannot carry out for tensors of these sizes.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"numbers of p.grad of {given.parameter_name}, of the shape {tuple(ordinary(given).shape)}, are put beside a tensor that they do not "
        "fit, with tp_size (or ep_size) above 1: rows and columns of a gradient are those of the whole, and those of a weight in a loop "
        "of your own are this rank's part. Take those of the whole weight, torch.zeros_like(p.grad) + p.detach() in place of "
        "p.detach(), or do it in a callback of a Trainer (on_pre_optimizer_step), where both are whole, or set tp_size to 1."
    ) from error
