"""Follows code that handles weights before they are read: casts are repeated after reading, changes of values are refused.

On the `meta` device a change of values does nothing and says nothing, so the checkpoint's values would be trained instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import id_of_storage, no_torch_function, version_of


DONE = "hf_parallel_done"
_GET, _SET = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass
class _Done:
    """Changes that code made to a tensor before its values were read.

    Args:
        version: torch's count of changes in place when it was followed.
        data: Result of `tensor.data`; changes of it have a count of their own.
        dtypes: Dtypes it was cast to, in order.
        is_changed: Whether values were changed in a way that no count shows.
    """

    version: int
    data: Tensor | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    is_changed: bool = False

    def get(self, data: Tensor) -> Tensor:
        """The tensor that code gets as `tensor.data`: the same one each time."""
        if self.data is None:
            self.data = data
        return self.data

    def set(self, before: Tensor, after: Tensor) -> None:
        """Note that `tensor.data` was set: a cast, or other values."""
        self.is_changed |= self.data is not None and version_of(self.data) > 0
        self.data = None
        if before.dtype != after.dtype:
            self.dtypes.append(after.dtype)
        elif id_of_storage(before.untyped_storage()) != id_of_storage(after.untyped_storage()):
            self.is_changed = True

    def changes(self, tensor: Tensor) -> bool:
        """Whether values of the tensor were changed."""
        return (
            self.is_changed
            or version_of(tensor) != self.version
            or (self.data is not None and version_of(self.data) > 0)
        )


class _NotRead(nn.Parameter):
    """A parameter without values, whose `data` is followed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_torch_function():
            done = vars(args[0]).get(DONE) if args and isinstance(args[0], _NotRead) else None
            before = args[0].detach() if func == _SET and done is not None else None
            result = func(*args, **(kwargs or {}))
        if done is None:
            return result
        if before is not None:
            done.set(before, args[1])
        return done.get(result) if func == _GET else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that has what was done to this one."""
        with no_torch_function():
            made = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        done: _Done | None = vars(self).get(DONE)
        if done is not None:
            vars(made)[DONE] = _Done(version_of(made), None, list(done.dtypes), done.changes(self))
        return made


def follow(tensors: Sequence[Tensor]) -> None:
    """Begin to note what is done to tensors without values."""
    for tensor in tensors:
        vars(tensor)[DONE] = _Done(version_of(tensor))
        if type(tensor) is nn.Parameter:
            tensor.__class__ = _NotRead


def unfollow(named: Mapping[str, Tensor]) -> tuple[dict[str, list[torch.dtype]], str | None]:
    """End it.

    Args:
        named: Every tensor without values of a model.

    Returns:
        What each tensor was cast to, in order, and the name of the first whose values were changed, or that was not followed.
    """
    changed, casts = None, {}
    for name, tensor in named.items():
        done: _Done | None = vars(tensor).pop(DONE, None)
        if isinstance(tensor, _NotRead):
            tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        if done is None or done.changes(tensor):
            changed = changed or name
        else:
            casts[name] = done.dtypes
    return casts, changed
