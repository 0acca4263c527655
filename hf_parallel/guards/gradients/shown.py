"""Stands in for `parameter.grad` between the reduction and the optimizer step, where a rank does not have all of it.

Each rank of a pipeline has the gradients of its stages, each tensor-parallel rank rows of some, and under ZeRO 1 and 2 the
optimizer's parts have them. User code clips (`torch.nn.utils.clip_grad_norm_`), masks, scales and reads them all the same.
A `SharedGradient` stands in their place: norms of it are those of the whole tensor, norms over all parameters are those of
the whole model, and what is written to it reaches the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_parallel.compat.private_torch import (
    in_backward_pass,
    no_torch_function,
    without_memory,
    writes_arguments,
)
from hf_parallel.compat.torch_tools import is_elementwise, mixes_elements, own_shape, pytree
from hf_parallel.errors import ParallelError, UnsupportedError
from hf_parallel.guards.gradients.shown_ops import COPIES, IN_PLACE, LINEAR, NAMES_OF_NORMS, NORMS, SAME, VIEWS, aten
from hf_parallel.guards.gradients.stands import Part, Stand, Sums, refuse_kept
from hf_parallel.model.tensors import tensors_in


class SharedGradient(Stand):
    """A gradient of which this rank does not have all, or does not have it here."""

    part: Part
    sums: Sums
    memory: tuple[int, ...]
    changed: Tensor | None  # a tensor of values made from the gradient, sharded alike; None: the gradient itself

    @staticmethod
    def of(like: Tensor, part: Part, sums: Sums, changed: Tensor | None = None) -> SharedGradient:
        """Stands for the gradient of `like`, or for `changed`."""
        made: SharedGradient = without_memory(SharedGradient, own_shape(like), like.dtype, like.device)
        made.part, made.sums, made.memory, made.changed = part, sums, part.memory, changed
        return made

    def plain(self) -> Tensor:
        return self.here().tensor() if self.changed is None else self.changed

    def here(self) -> Part:
        """The gradient's place.

        Raises:
            UnsupportedError: Other values have taken its place there.
        """
        if self.changed is None and self.memory != self.part.memory:
            refuse_kept(self.part.name)
        return self.part

    def read(self) -> Tensor:
        self.part.read()
        return self.part.whole(self.plain()) if self.part.is_shard else self.plain()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Sizes are those of the whole gradient, as its rows are."""
        sizes = list(own_shape(self))
        if self.part.is_shard and self.part.sharded_dim is not None:
            sizes[self.part.sharded_dim] = self.part.full_size
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def nelement(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        """Rows are those of the whole gradient: a rank has others, and fewer."""
        return self._opened()[self._fitting_key(key)] if self.part.is_shard else super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.part.is_shard:
            super().__setitem__(key, value)
            return
        whole, key = self._opened(), self._fitting_key(key)
        # Rows and columns of the whole may have the shape of this rank's shard; only what is for all of it can be a shard.
        is_for_all = whole[key].numel() == whole.numel()
        whole[key] = self._fitting(value) if is_for_all else _whole(value)

    @property
    def data(self) -> Tensor:
        """Another stand-in, as torch's is another tensor with the same memory; what is assigned is kept apart from that."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if isinstance(values, SharedGradient) and values.changed is None and values.part is self.part:
            values.here()
            return  # `p.grad.data /= 3` has changed the memory that it assigns
        with torch.no_grad():
            if not self.part.is_summand:  # other tensors with the memory of before keep what they have
                self.changed = self.plain().clone()
                self.part.part_from()
            self.copy_(values)

    def _fitting_key(self, key: Any) -> Any:
        """The whole of masks that are sharded as this gradient is: made of the parameter, say."""
        return pytree.tree_map_only(
            Tensor, lambda leaf: self._fitting(leaf) if leaf.dtype is torch.bool else leaf, _whole(key)
        )

    def _fitting(self, value: Any) -> Any:
        """The whole of what is sharded as this gradient is."""
        value = _whole(value)
        is_shard = isinstance(value, Tensor) and own_shape(self) == value.shape != self.shape
        return self.part.whole(value) if is_shard else value

    def _opened(self) -> Tensor:
        return self.here().open() if self.changed is None else self.part.whole(self.changed)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that mix elements on the whole tensor instead of the shard: they would count this rank's rows alone."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in NAMES_OF_NORMS and mixes_elements(func):
            shard, out = _shard_in(args, kwargs), kwargs.get("out")
            if shard is not None and isinstance(out, SharedGradient):
                return out.copy_(func(*args, **{key: value for key, value in kwargs.items() if key != "out"}))
            if shard is not None:
                return _on_whole(func, args, kwargs, shard)
        with no_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if isinstance(first, SharedGradient):
            if func in SAME:
                same = SharedGradient.of(first, first.part, first.sums, first.changed)
                same.memory = first.memory
                return same
            if func in NORMS and (len(args) < 3 or not args[2]):
                return PartialNorm.of([first], _type_of(args))
            if func is aten.add_.Tensor and first.changed is None and in_backward_pass():
                first.part.arrive(args[1])
                return first
            if first.changed is None and func in IN_PLACE and not any(_is_big(arg) for arg in args[1:]):
                first.here().change(func, [plain_of(arg) for arg in args[1:]], kwargs)
                return first
        if func in (aten._foreach_norm.Scalar,) and all(isinstance(one, SharedGradient) for one in first):
            return [PartialNorm.of([one], _type_of(args)) for one in first]
        shard = _shard_in(args, kwargs)
        if shard is None:
            return _carry_out(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs, shard)
        return _on_shard(func, args, kwargs, shard)


class PartialNorm(Stand):
    """Norms of gradients, 0-d or 1-d: single ones when they are read, that of the model when their norm is taken."""

    powers: Tensor
    names: tuple[str, ...]
    owned: tuple[bool, ...]
    norm_type: float
    sums: Sums

    @staticmethod
    def of(gradients: Sequence[SharedGradient], norm_type: float) -> PartialNorm:
        one = gradients[0]
        powers = torch.stack([gradient.here().power(norm_type, gradient.changed) for gradient in gradients])
        names, owned = (one.part.name,), (one.part.owned,)
        dtype = torch.promote_types(one.dtype, torch.float32)
        return PartialNorm._make((), dtype, one.device, powers, names, owned, norm_type, one.sums)

    @staticmethod
    def _make(shape: Any, dtype: Any, device: Any, *values: Any) -> PartialNorm:
        made: PartialNorm = without_memory(PartialNorm, shape, dtype, device)
        made.powers, made.names, made.owned, made.norm_type, made.sums = values
        return made

    def plain(self) -> Tensor:
        self.sums.taken(self.names)
        return self.sums.own(self.powers, self.norm_type).to(self.device, self.dtype).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if isinstance(first, PartialNorm):
            if func in SAME | COPIES:
                device, dtype = kwargs.get("device") or first.device, kwargs.get("dtype") or first.dtype
                values = (first.powers, first.names, first.owned, first.norm_type, first.sums)
                return PartialNorm._make(first.shape, dtype, device, *values)
            if func in NORMS and (len(args) < 3 or not args[2]) and _type_of(args) == first.norm_type and first.ndim:
                total = first.sums.total(
                    first.powers, dict(zip(first.names, first.owned, strict=True)), first.norm_type
                )
                return total.to(first.device, first.dtype)
        joins = func in (aten.stack.default, aten.cat.default) and len(set(args[1:]) | {0}) == 1
        if joins and all(isinstance(one, PartialNorm) for one in first):
            alike = len({(one.norm_type, one.ndim) for one in first}) == 1
            if alike:
                return PartialNorm._joined(first)
        return _carry_out(func, args, kwargs)

    @staticmethod
    def _joined(norms: Sequence[PartialNorm]) -> PartialNorm:
        one = norms[0]
        powers = torch.cat([norm.powers for norm in norms])
        names = tuple(name for norm in norms for name in norm.names)
        owned = tuple(flag for norm in norms for flag in norm.owned)
        return PartialNorm._make((len(names),), one.dtype, one.device, powers, names, owned, one.norm_type, one.sums)


def _type_of(args: Sequence[Any]) -> float:
    return float(args[1]) if len(args) > 1 and args[1] is not None else 2.0


def _is_big(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _carry_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on the tensors behind stand-ins; a result with the layout of a sharded gradient becomes a stand-in again."""
    stands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Stand)]
    summands = [stand for stand in stands if isinstance(stand, SharedGradient) and stand.part.is_summand]
    if summands and (func not in LINEAR or len(stands) > 1 or kwargs):
        summands[0].part.read()
    plain = {id(stand): stand.plain() for stand in stands}
    here = [pytree.tree_map(lambda leaf: plain.get(id(leaf), leaf), tree) for tree in (args, kwargs)]
    for stand in stands if not writes_arguments(func) else ():
        if isinstance(stand, SharedGradient):
            stand.sums.taken([stand.part.name])
    result = func(*here[0], **here[1])
    for stand in stands if writes_arguments(func) else ():
        if isinstance(stand, SharedGradient) and stand.changed is None:
            stand.part.close()  # what was opened is not what the shard is now
    back = {id(tensor): stand for stand in stands if (tensor := plain[id(stand)]) is not None}
    source = next((stand for stand in stands if isinstance(stand, SharedGradient)), None)

    def wrapped(leaf: Any) -> Any:
        if id(leaf) in back:
            return back[id(leaf)]
        shared = source is not None and (source.part.is_shard or source.part.is_summand or func in COPIES)
        if shared and source is not None and isinstance(leaf, Tensor) and leaf.shape == own_shape(source):
            return SharedGradient.of(leaf, source.part, source.sums, leaf)
        return leaf

    return pytree.tree_map(wrapped, result)


def _on_shard(func: Any, args: Any, kwargs: Any, first: SharedGradient) -> Any:
    """Run an elementwise function on the shard, and any other on the whole tensor."""
    changes = writes_arguments(func)
    if is_elementwise(func):
        leaves, here = pytree.tree_leaves((args, kwargs)), own_shape(first)
        parts = (
            [leaf for leaf in leaves if type(leaf) is Tensor and leaf.shape == here]
            if isinstance(args[0], Tensor)
            else []
        )
        first.part.note([leaf for leaf in leaves if _is_for_all_rows(leaf, first)], parts)
    # Lists, element by element: what some have got cannot be taken back.
    if changes and not isinstance(args[0], Tensor):
        return _carry_out(func, args, kwargs)
    if _keeps_rows(func, args, first) if func.is_view else is_elementwise(func):
        try:
            out = _carry_out(func, args, kwargs)
        except ParallelError:
            raise
        except (RuntimeError, IndexError):  # next to a mask, say, in the shape of the whole
            out, counts = (), False
        else:
            counts = changes or func.is_view
        made = tensors_in(out)
        if counts or (made and all(isinstance(leaf, SharedGradient) for leaf in made)):
            return out
    if func.overloadpacket in VIEWS and list(args[1]) == [own_shape(first).numel()]:  # flatten() has counted the shard
        args = (first, [-1], *args[2:])
    if isinstance(target := kwargs.get("out"), SharedGradient):
        others = {key: value for key, value in kwargs.items() if key != "out"}
        return target.copy_(func.overloadpacket(*_whole(args), **_whole(others)))
    if (changes or func.is_view) and args[0] is first:
        return _on_opened(func, args, kwargs, first, changes=changes)
    return func(*_whole(args), **_whole(kwargs))


def _on_whole(func: Any, args: Any, kwargs: Any, first: SharedGradient) -> Any:
    """A function of the whole; where it changes a gradient, or gives a view of it, that counts."""
    first.part.read()
    target: Any = args[0] if args else None
    changes = target is first and func.__name__.endswith("_") and not func.__name__.endswith("__")
    if not changes:
        whole = _whole((args, kwargs))
        out = func(*whole[0], **whole[1])
        sources = {leaf.untyped_storage().data_ptr() for leaf in tensors_in(whole)}
        made = tensors_in(out)
        if (
            target is not first
            or first.changed is not None
            or not any(leaf.untyped_storage().data_ptr() in sources for leaf in made)
        ):
            return out
    return _on_opened(func, args, kwargs, first, changes=changes)


def _on_opened(func: Any, args: Any, kwargs: Any, first: SharedGradient, *, changes: bool) -> Any:
    """A function that changes a shard, its first argument, or gives a view of it: what is done to the whole counts."""
    out = func(first._opened(), *_whole(args[1:]), **_whole(kwargs))
    if changes and first.changed is not None:
        first.changed.copy_(first.part.cut(out))
    return first if changes else out


def _shard_in(args: Any, kwargs: Any) -> SharedGradient | None:
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, SharedGradient) and leaf.part.is_shard), None)


def _drawn(func: Any, args: Any, kwargs: Any, first: SharedGradient) -> Any:
    """Random numbers for a shard are its part of those for the whole: every rank draws them all."""
    out = func(*_whole(args), **_whole(kwargs))
    if writes_arguments(func):
        return _carry_out(aten.copy_.default, (first, first.part.cut(out)), {})

    def shard(leaf: Any) -> Any:
        alike = isinstance(leaf, Tensor) and leaf.shape == first.shape
        return SharedGradient.of(mine := first.part.cut(leaf), first.part, first.sums, mine) if alike else leaf

    return pytree.tree_map(shard, out)


def _whole(tree: Any) -> Any:
    def whole(leaf: Any) -> Any:
        shard = isinstance(leaf, SharedGradient) and leaf.part.is_shard
        return leaf.part.whole(leaf.plain()) if shard else plain_of(leaf)

    return pytree.tree_map(whole, tree)


def _is_for_all_rows(value: Any, first: SharedGradient) -> bool:
    """Whether a number or tensor that is read next to a shard changes each of its rows (or columns) by the same."""
    if not isinstance(value, Tensor):
        return isinstance(value, int | float)
    along = (first.part.sharded_dim or 0) - first.ndim
    return type(value) is Tensor and (value.ndim < -along or value.shape[along] == 1)


def _keeps_rows(func: Any, args: Any, first: SharedGradient) -> bool:
    """Whether a view is asked for in the shape of the shard (`g.view(len(g), -1)`): rows of the shard are rows."""
    sizes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    here = own_shape(first)
    same = list(sizes) == list(here)
    rows = first.part.sharded_dim == 0 and len(sizes) > 1 and sizes[0] == here[0]
    return func.overloadpacket in VIEWS and (same or rows)


def plain_of(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the values of one that may be a stand-in."""
    return tensor.plain() if isinstance(tensor, Stand) else tensor


def refuse_part(names: Sequence[str], present: int, pp_size: int) -> None:
    """Norms over some of a stage's gradients cannot be added up over stages that have others.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"a norm over {len(names)} of the {present} gradients of this stage (first: {names[0]}) with pp_size={pp_size}: each stage "
        "has other parameters, so it cannot be told which belong together. Clip all of model.parameters(), or each parameter "
        "by itself."
    )


def root(total: Tensor, norm_type: float) -> Tensor:
    """The norm, from the sum of powers."""
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)
