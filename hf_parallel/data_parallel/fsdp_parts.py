"""This rank's part of a tensor that `fully_shard` has sharded by rows: what may be done to it, and the way to the whole and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_parallel.compat.private_torch import writes_arguments
from hf_parallel.errors import UnsupportedError


class KeptPart(DTensor):
    """A part whose memory stays: `fully_shard` works on it, and torch's own `DTensor` drops `parameter.data = new`."""

    @property
    def data(self) -> Tensor:
        """The part, outside of autograd."""
        return DTensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, new: Tensor) -> None:
        if isinstance(new, DTensor) and new.shape == self.shape and _memory(new) == _memory(self):
            return  # parameter.data += x: it was changed in place
        raise UnsupportedError(
            f"parameter.data = new, on a parameter of shape {tuple(self.shape)}, with zero.stage: 3 or engine: fsdp2: the parts are in "
            "the memory of fully_shard, so the new data would be dropped. Change it in place, parameter.data.copy_(new), or set "
            "zero.stage to 1 or 2 of the native engine."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A parameter by itself, in parts of its own: a copy to average, say."""
        copied: Tensor = memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))
        return copied


class CopiedRows(DTensor):
    """Rows of a tensor that ranks share out by rows: a copy, so that what is written to them would be lost."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        written = first if isinstance(first, list | tuple) else [first]
        if writes_arguments(func) and any(isinstance(one, CopiedRows) for one in written):
            raise UnsupportedError(
                "rows of a parameter or gradient were changed in place (p.grad[:n].zero_(), p.data[:n] = x) with zero.stage: 3 or "
                "engine: fsdp2: ranks share out tensors by rows, so rows are a copy and the change would be lost. Change gradients in "
                "a hook (parameter.register_hook), which gets the whole, change whole tensors, or set zero.stage to 1 or 2 of the "
                "native engine."
            )
        found = super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func.is_view and type(found) is DTensor:
            found.__class__ = cls
        return found


def is_part(tensor: object) -> bool:
    """Whether a tensor is this rank's part of one that is sharded."""
    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that is sharded, in its own memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _memory(tensor: Tensor) -> int:
    return local_of(tensor).data_ptr()


def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is sharded, on every rank; any other tensor as it is. Collective over its ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, local = tensor.device_mesh, local_of(tensor).detach()
    here = _as_part(tensor, local.to(mesh.device_type))  # parts in host memory are copied from the device
    whole: Tensor = here.full_tensor()
    return whole


def rows_of(like: Tensor, whole: Tensor) -> Tensor:
    """The rows of `whole` that `like` has, a part of a tensor with the shape of `whole`."""
    if not isinstance(like, DTensor):
        return whole
    first = first_row_of(like)
    return whole[first : first + local_of(like).shape[0]]


def first_row_of(tensor: Tensor) -> int:
    """Number of the first row that this rank has of a sharded tensor; 0 for any other tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    ranks, rank = tensor.device_mesh.size(-1), tensor.device_mesh.get_local_rank(-1)
    return min(rank * -(-tensor.shape[0] // ranks), tensor.shape[0])


def split_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer state of a parameter, its tensors sharded as the parameter is."""
    return {
        key: _as_part(parameter, rows_of(parameter, value).to(local_of(parameter).device).clone())
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def part_like(like: Tensor, local: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded as `like` is, or as they are if it is not."""
    return _as_part(like, local.to(local_of(like).device)) if isinstance(like, DTensor) else local


def _as_part(like: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
