"""Track tensors that are this rank's parts of parameters, or were made of them element by element."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_parallel.compat.private_torch import id_of_storage, no_torch_function, own_tensor
from hf_parallel.compat.torch_tools import WeakStorage
from hf_parallel.tensor_parallel.run.whole_tensors import Owned, gathered, part_of_gradient


PLAIN = (Tensor, nn.Parameter)
Place: TypeAlias = tuple[int, torch.Size]


class KnownParts:
    """Tells this rank's parts of parameters, and what was made of them element by element, from other tensors.

    Args:
        held: The parameters, and how they are sharded; at least one.
        kinds: Classes of tensors, beside torch's own, that may be parts.
        meet: Called before the first part is put together in a call of user code: all ranks must.
        gathered: Told each part that is put together, and the whole of it.
    """

    def __init__(
        self,
        held: Sequence[tuple[Tensor, Owned]],
        kinds: tuple[type[Tensor], ...] = (),
        meet: Callable[[], None] = lambda: None,
        gathered: Callable[[Tensor, Tensor], None] = lambda part, whole: None,
    ) -> None:
        self.reads, self.kinds, self._meet, self._gathered = held[0][1].reads, kinds, meet, gathered
        self._met = False
        self._held = {id(tensor): (tensor, owned) for tensor, owned in held}
        self._made = WeakTensorKeyDictionary()
        self._memory: dict[int, tuple[WeakStorage, torch.Size, Owned]] = {}  # of plain tensors among them
        self._places: dict[Place, tuple[Tensor, Owned]] | None = None

    def begin(self) -> None:
        """Find the parameters again before user code is called: they may have other memory by now."""
        self._places, self._met = None, False
        self._memory = {key: kept for key, kept in self._memory.items() if not kept[0].expired()}

    def of(self, tensor: Tensor) -> tuple[Tensor, Owned] | None:
        """A tensor that is a part with its layout; None for any other."""
        held = self._held.get(id(tensor))
        if held is not None or type(tensor) not in (*PLAIN, *self.kinds):
            return held
        owned = self._made.get(tensor)
        if (
            owned is None and type(tensor) is nn.Parameter
        ):  # made of one by its constructor, or copied: no function of torch
            kept = self._memory.get(id_of_storage(tensor.untyped_storage()))
            owned = kept[2] if kept is not None and not kept[0].expired() and kept[1] == tensor.shape else None
        if owned is None:
            if self._places is None:
                self._places = {place: one for one in self._held.values() if (place := _place(one[0])) is not None}
            place = _place(tensor)
            there = self._places.get(place) if place is not None else None
            if there is not None and _place(there[0]) == place:  # else it was moved, and something else is there
                owned = there[1]
        return None if owned is None else (tensor, owned)

    def whole(self, part: Tensor, owned: Owned) -> Tensor:
        """Put a part together; collective over the tensor-parallel group."""
        if not self._met:
            self._met = True
            self._meet()
        with no_torch_function():
            whole: Tensor = _PutTogether.apply(part, owned)  # type: ignore[no-untyped-call]
        self._gathered(part, whole)
        return whole

    def note(self, tensor: Tensor, owned: Owned) -> None:
        """`tensor` was made of a part that is sharded so."""
        if type(tensor) in (*PLAIN, *self.kinds):
            self._made[tensor] = owned
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            with no_torch_function():
                memory = tensor.untyped_storage()
                self._memory[id_of_storage(memory)] = WeakStorage(memory), tensor.shape, owned


class _PutTogether(torch.autograd.Function):
    """The whole of a part, in whose gradient each rank finds that of its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, owned: Owned) -> Tensor:
        ctx.owned = owned
        return gathered(owned, part.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return part_of_gradient(ctx.owned, gradients[0]), None


def _place(tensor: Tensor) -> Place | None:
    """Address and shape of a tensor's memory; None for one without memory of its own."""
    if type(tensor) is DTensor or tensor.layout is not torch.strided:
        return None
    with no_torch_function(), contextlib.suppress(RuntimeError):  # of what `torch.func` wraps
        at = tensor.data_ptr()
        return (at, tensor.shape) if at else None
    return None


def known_parts(model: nn.Module, **options: Any) -> KnownParts | None:
    """Collect the sharded tensors of a model; None if there are none. Options as of `KnownParts`."""
    held = [
        (tensor, owned)
        for module in model.modules()
        for key, owned in vars(module).get("tp_owned", {}).items()
        if (tensor := own_tensor(module, key)) is not None
    ]
    return KnownParts(held, **options) if held else None
