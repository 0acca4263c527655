"""Selective recomputation: results that are expensive to compute are kept, the rest is computed again.

Kept are the results of attention kernels and of one matrix product in so many. Torch's own selective checkpointing does
the same but misses what a collective changes in place, which raises no version: the second run would sum a sum. Here a
result that anything writes to is not kept.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 5; which products: torchtitan's "selective op".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_parallel.compat.private_torch import name_of_op, writes_arguments
from hf_parallel.compat.torch_tools import TorchDispatchMode
from hf_parallel.errors import PlanError
from hf_parallel.model.tensors import map_tensors, tensors_in


PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm"})
ATTENTION = ("scaled_dot_product", "flash_att")  # parts of the names of kernels that never store the attention matrix


class KeptResults:
    """Results of one forward that its second run takes over from the first.

    Args:
        every: Number of matrix products, in the order in which they run, of which the first is kept; 1 keeps all.
        generators: Random generators that an attention kernel may draw from.
    """

    def __init__(self, every: int, generators: Sequence[torch.Generator]) -> None:
        self._every, self._generators = every, generators
        self._results: dict[int, tuple[str, Any, list[Tensor] | None]] = {}
        self._places: dict[int, int] = {}  # storage of a result -> its number; only during the first run

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return tensors_in([value for _, value, _ in self._results.values()])

    def keeping(self) -> TorchDispatchMode:
        """Around the first run."""
        return _Numbering(self._keep)

    def taking(self) -> TorchDispatchMode:
        """Around the second run."""
        return _Numbering(self._take)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """End the first run, which hands out these tensors; others may write to them."""
        self._forget(tensors)
        self._places.clear()

    def _keep(self, number: int, product: int | None, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = name_of_op(func)
        if writes_arguments(func) or name.startswith("c10d::"):
            self._forget(tensors_in((args, kwargs)))
            return func(*args, **kwargs)
        if number < 0 or (product is not None and product % self._every):
            return func(*args, **kwargs)
        states = self._states() if product is None else None
        result = func(*args, **kwargs)
        drawn = None if states is None or _same(states, self._states()) else self._states()
        self._results[number] = (name, _detached(result), drawn)
        for tensor in tensors_in(result):
            if tensor.numel():
                self._places[_storage(tensor)] = number
        return result

    def _take(self, number: int, product: int | None, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if number not in self._results:
            return func(*args, **kwargs)
        name, result, drawn = self._results[number]
        if name != name_of_op(func):
            raise PlanError(
                f"operation {number} of a block was {name} and is {name_of_op(func)} when it is run again for the backward: "
                "it took another path. Set activation_checkpointing.mode to block, or leave the block out."
            )
        for generator, state in zip(self._generators, drawn or [], strict=False):
            generator.set_state(state)
        return _detached(result)

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            number = self._places.pop(_storage(tensor), None) if tensor.layout == torch.strided else None
            if number is not None:
                del self._results[number]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]


class _Numbering(TorchDispatchMode):
    """Numbers the expensive ops: attention and products together, products once more by themselves; -1 is any other op."""

    def __init__(self, handle: Callable[[int, int | None, Any, Any, Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._handle = handle
        self._numbers = self._products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, number, product = name_of_op(func), -1, None
        if name in PRODUCTS and not writes_arguments(func):
            product, self._products = self._products, self._products + 1
        if product is not None or (any(part in name for part in ATTENTION) and "backward" not in name):
            number, self._numbers = self._numbers, self._numbers + 1
        return self._handle(number, product, func, args, kwargs or {})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _detached(result: Any) -> Any:
    """The same memory in tensors of their own, which get no graph."""
    return map_tensors(lambda path, tensor: tensor.detach(), result)


def _same(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
