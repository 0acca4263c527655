"""Remembers the results of ops on `meta`: arguments of the same shapes give tensors of the same shapes again.

The kernels of `meta` are Python (torch 2.13): one of a multiplication takes as long as a small matrix product, and a model calls the
same few in each of its blocks, for each sample that a plan is made with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import gives_new_memory, id_of_storage
from hf_parallel.model.tensors import tensors_in


MOST_KNOWN: Final = 4096
PLAIN: Final = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
GROUPED: Final = "aten._grouped_mm.default"
OF_TENSORS: Final = (Tensor, nn.Parameter)

_known: dict[Any, Callable[[], Any]] = {}


def call(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`op(*args, **kwargs)`; on `meta`, new tensors as the op gave for such arguments before.

    That is for ops which, by their schema and when they were called first, make new memory and change none.
    """
    key = _key(op, args, kwargs) if gives_new_memory(op) else None
    if key is None:
        return op(*args, **kwargs)
    if key in _known:
        return _known[key]()
    out = _called(op, args, kwargs)
    again = _maker(out, {id_of_storage(t.untyped_storage()) for t in tensors_in((args, kwargs))})
    if again is not None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = again
    return out


def _called(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an op; torch 2.13's rule for the shape of a product of grouped rows knows bf16 alone, and kernels other types, too."""
    if str(op) == GROUPED and args[0].dtype != torch.bfloat16 and (args[0].ndim, args[1].ndim) == (2, 3):
        return args[0].new_empty(len(args[0]), args[1].shape[2])
    return op(*args, **kwargs)


def _key(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All that shapes depend on; None where that is not known, or values may count."""
    try:
        return op, torch.get_default_dtype(), _described(args), *((name, _described(kwargs[name])) for name in kwargs)
    except TypeError:
        return None


def _described(value: Any) -> Any:
    kind = type(value)
    if kind in OF_TENSORS:
        if not value.is_meta or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise TypeError
        return value.dtype, value.shape, value.stride()
    if kind is tuple or kind is list:
        return kind, *map(_described, value)
    if kind not in PLAIN:
        raise TypeError
    return kind, value


def _maker(out: Any, given: set[int]) -> Callable[[], Any] | None:
    """Makes such an output anew; None if it is not all new and plain."""
    kind = type(out)
    if kind is tuple or kind is list:
        makers = [_maker(item, given) for item in out]
        return None if None in makers else lambda: kind(make() for make in makers if make is not None)
    if kind is not Tensor or not out.is_meta or out.layout is not torch.strided:
        return None
    storage = out.untyped_storage()
    make = functools.partial(
        torch.empty_strided, out.shape, out.stride(), dtype=out.dtype, device=out.device, requires_grad=False
    )
    is_plain = out.storage_offset() == 0 and storage.nbytes() == make().untyped_storage().nbytes()
    is_new = id_of_storage(storage) not in given
    given.add(id_of_storage(storage))
    return make if is_plain and is_new else None
