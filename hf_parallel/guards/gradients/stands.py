"""Stand-ins for tensors: what user code is given, where the values really are, and how ranks add up what they count of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hf_parallel.compat.private_torch import not_overridden
from hf_parallel.errors import UnsupportedError


class Part(Protocol):
    """The real place of a gradient for which something else stands.

    Attributes:
        name: Name of the parameter.
        owned: Whether this rank's stage counts it in the norm of the model.
        is_shard: Whether `tensor` gives a shard of the parameter's gradient.
        is_summand: Whether other ranks have the rest of a sum that is not made yet.
    """

    name: str
    owned: bool
    is_shard: bool
    is_summand: bool

    @property
    def sharded_dim(self) -> int | None:
        """Dim along which it is a shard."""
        ...

    @property
    def full_size(self) -> int:
        """Extent of that dimension in the whole."""
        ...

    def open(self) -> Tensor:
        """The whole of a shard, whose changes in place count; collective."""
        ...

    def close(self) -> None:
        """Let the shard count, and what was opened no more."""
        ...

    def tensor(self) -> Tensor:
        """The gradient in the parameter's shape on this rank; may be collective."""
        ...

    def whole(self, local: Tensor) -> Tensor:
        """The whole of a tensor that is sharded as the gradient is; collective."""
        ...

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor that is sharded as the gradient is."""
        ...

    def change(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Apply an elementwise change by numbers."""
        ...

    def note(self, given: Sequence[object], parts: Sequence[Tensor] = ()) -> None:
        """Note the numbers among what a shard, or values made of it, are changed by, and tensors of its shape."""
        ...

    def arrive(self, gradient: Tensor) -> None:
        """Autograd adds to the gradient."""
        ...

    def read(self) -> None:
        """Notice that user code reads values; refused of a summand."""
        ...

    @property
    def memory(self) -> tuple[int, ...]:
        """Says where the gradient is: something else where other values have taken its place."""
        ...

    def part_from(self) -> None:
        """Note that the parameter's gradient is somewhere else from now on."""
        ...

    def power(self, norm_type: float, local: Tensor | None) -> Tensor:
        """This rank's summand in a sum of powers (0-d, fp64): of the gradient, or of a tensor like it."""
        ...


class Sums(Protocol):
    """Adds up what ranks count."""

    def own(self, powers: Tensor, norm_type: float) -> Tensor:
        """Norms of single gradients, f64[n]; collective over the ranks that hold parts of them."""
        ...

    def total(self, powers: Tensor, owned: Mapping[str, bool], norm_type: float) -> Tensor:
        """Norm over several gradients, 0-d f64, by name and whether this rank's stage counts them; collective."""
        ...

    def taken(self, names: Sequence[str]) -> None:
        """Note that user code takes numbers of single gradients."""
        ...


class Stand(torch.Tensor):
    """A tensor without memory whose functions are carried out elsewhere."""

    __torch_function__ = not_overridden()

    def plain(self) -> Tensor:
        """An ordinary tensor with its values."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """The gradient as `plain` gives it, for user code."""
        return self.plain()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.read().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.read().tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().clone().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def refuse_kept(name: str) -> NoReturn:
    """Refuse a stand-in for a gradient whose values are gone.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"a gradient of {name} that code has kept from before (g = p.grad, or p.grad.detach() without a copy) is used "
        "with zero.stage above 0, where the optimizer's part has other values by now. Keep p.grad.clone()."
    )
