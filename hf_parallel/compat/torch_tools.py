"""Tools of torch that have no public name: pytrees, dispatch modes, fake tensors, operations on many tensors at once.

Apart from `private_torch`, which rooms use that do not import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.nn.modules.conv import _ConvNd as ConvModule
from torch.nn.modules.dropout import _DropoutNd as DropoutModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


__all__ = [
    "ConvModule",
    "DropoutModule",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "WeakStorage",
    "is_traceable_wrapper_subclass",
    "pytree",
]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """`target.copy_(source)` for each pair, in a few kernels."""
    torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], others: list[Tensor]) -> None:
    """`target.add_(other)` for each pair, in a few kernels."""
    torch._foreach_add_(targets, others)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Their elements one after the other, of one type and device, in one kernel; of a single tensor perhaps a view."""
    found: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return found


def scale_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """`tensor.mul_(factor)` for each, in a few kernels."""
    torch._foreach_mul_(tensors, factor)


def sent_to(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """Numbers of the host as f[n] on a device, which is not waited for: from pageable memory a copy would wait."""
    here = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def norms_of(tensors: list[Tensor], norm_type: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The norm of each tensor, in a few kernels; summed in `dtype`, if one is given."""
    return torch._foreach_norm(tensors, norm_type, dtype=dtype)


def move_values_only(model: nn.Module) -> None:
    """From here on `model.to()` and its like cast tensors without values but leave them where they are: nowhere."""
    vars(model)["_apply"] = MethodType(_apply, model)


def move_everything(model: nn.Module) -> None:
    """Undo `move_values_only`."""
    vars(model).pop("_apply", None)


def _apply(model: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    def apply(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return fn(tensor)
        dtype = fn(torch.empty(0, dtype=tensor.dtype)).dtype
        return tensor if dtype == tensor.dtype else tensor.to(dtype)

    applied: nn.Module = type(model)._apply(model, apply, recurse)
    return applied


def sharing_memory(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Names of two tensors that are two objects in one memory; None if there are none. Fake tensors are at no address."""
    real = ((name, tensor) for name, tensor in named if tensor.numel() and not isinstance(tensor, FakeTensor))
    unique = {id(tensor): (name, tensor) for name, tensor in real}
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in unique.values())
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            return name, other
    return None
