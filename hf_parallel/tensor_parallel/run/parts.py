"""Code of users that all ranks run alike and that computes with weights, of which tensor-parallel ranks hold parts.

It has them from `model.parameters()`, from attributes of modules or from `model.state_dict()`. What changes or makes single
elements is right on parts, and runs on them; numbers drawn for a part, and tensors in the shape of the whole, are cut. Anything
else (a norm, a mean, a count of elements) means the whole tensor and is given it; all ranks must then do the same, as callbacks do. Rows and views of a part are refused by name: they would be other rows on each rank.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_torch import brings_into_file, in_backward_pass
from hf_parallel.compat.torch_tools import draws, is_elementwise, own_shape, pytree
from hf_parallel.errors import UnsupportedError
from hf_parallel.model.tensors import tensors_in
from hf_parallel.tensor_parallel.run.functions import copy_to_tp
from hf_parallel.tensor_parallel.run.known_parts import PLAIN, KnownParts
from hf_parallel.tensor_parallel.run.whole_tensors import Owned, stand_in


# Where a reduction has the dimensions that it is over, if not by name.
DIM_AT = dict.fromkeys(
    ("sum", "mean", "max", "min", "amax", "amin", "std", "var", "argmax", "argmin", "any", "all"), 1
)
DIM_AT |= {"norm": 2, "vector_norm": 2, "linalg_vector_norm": 2}
VIEWS = frozenset(
    {
        *(
            "__getitem__",
            "__setitem__",
            "select",
            "narrow",
            "view",
            "flatten",
            "ravel",
            "t",
            "transpose",
            "permute",
            "chunk",
        ),
        *("split", "unbind", "unfold", "diagonal", "as_strided", "index_select", "gather", "scatter_", "scatter_add_"),
        *("index_fill_", "index_copy_", "index_add_", "masked_select", "__iter__", "squeeze", "reshape"),
        *("view_as", "reshape_as"),
    }
)
# Draw as many numbers as the whole has, whatever they begin from.
DRAWS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
)
DRAWS |= {"kaiming_uniform_", "rand_like", "randn_like", "randint_like"}
SIZES = frozenset(
    {Tensor.numel, Tensor.nelement, Tensor.size, Tensor.__len__, Tensor.shape.__get__, Tensor.nbytes.__get__}  # type: ignore[attr-defined]
)
# Mean the whole of a part; the last is what saving asks for.
READS = frozenset({"numpy", "tolist", "__array__", "equal", "allclose", "__reduce_ex__"})
ASSIGNS = frozenset({Tensor.data.__set__, Tensor.grad.__set__})  # type: ignore[attr-defined, union-attr]
BACKWARDS = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
# Stand between user code and here, the last beside stages.
PASSING = ("torch.", "contextlib.", "hf_parallel.guards.calls.on_stages.")
LIBRARIES = ("hf_parallel.", "transformers.", "accelerate.", "safetensors.", "peft.")


class OnParts(TorchFunctionMode):
    """Notices what user code does with this rank's parts of parameters; kept as `watching` of the model's `Reads`."""

    def __init__(self, known: KnownParts) -> None:
        super().__init__()
        self._known, self._reads = known, known.reads

    def __enter__(self) -> Any:
        self._known.begin()
        self._reads.watching = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._reads.watching = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._reads.depth or in_backward_pass():  # a model that user code runs works on parts
            return func(*args, **kwargs)
        leaves = tensors_in((args, kwargs))
        if leaves and isinstance(leaves[0], DTensor) and getattr(func, "__name__", "") in DRAWS:
            _refuse_draw()
        found = [known for leaf in leaves if (known := self._known.of(leaf)) is not None]
        if not found:
            return func(*args, **kwargs)
        if brings_into_file(func, sys._getframe(1), LIBRARIES):
            _refuse_file(found[0][1])
        # As PEFT does when it makes adapters anew.
        draws_for_part = getattr(func, "__name__", "") in DRAWS and leaves[0] is found[0][0]
        if not draws_for_part and not _asked_by_user():
            out = func(*args, **kwargs)
            self._is_alike(out, leaves, found[0])
            return out
        marked = next((type(leaf) for leaf, _ in found if type(leaf) in self._known.kinds), None)
        if marked is None:
            return self._carry_out(func, args, kwargs)
        return self._on_marked(marked, func, args, kwargs)

    def _on_marked(self, kind: type[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """Do what `_carry_out` does for tensors that refuse it here; results of their shape refuse it again."""
        before: dict[int, Tensor] = {}

        def bare(leaf: Any) -> Any:
            known = self._known.of(leaf) if isinstance(leaf, Tensor) and type(leaf) in self._known.kinds else None
            if known is None:
                return leaf
            plain = leaf.as_subclass(Tensor)
            self._known.note(plain, known[1])
            before[id(plain)] = leaf
            return plain

        def marked(leaf: Any) -> Any:
            known = self._known.of(leaf) if isinstance(leaf, Tensor) and id(leaf) not in before else None
            if known is None:
                return before.get(id(leaf), leaf)
            again = leaf.as_subclass(kind)
            self._known.note(again, known[1])
            return again

        args, kwargs = pytree.tree_map(bare, (args, kwargs))
        return pytree.tree_map(marked, self._carry_out(func, args, kwargs))

    def _carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` on parts, where that gives the parts of its result on the whole; else on the whole."""
        leaves = tensors_in((args, kwargs))
        found = [known for leaf in leaves if (known := self._known.of(leaf)) is not None]
        name = getattr(func, "__name__", "")
        if func in BACKWARDS:
            return self._differentiate(func, args, kwargs)
        target = kwargs.get("out")
        if isinstance(target, Tensor) and self._known.of(target) is not None:
            made = self._carry_out(func, args, {key: value for key, value in kwargs.items() if key != "out"})
            return self._carry_out(Tensor.copy_, (target, made), {})
        if func in ASSIGNS:
            target = self._known.of(args[0])
            return func(args[0], args[1] if target is None else _fitting(args[1], *target))
        changes = name.endswith("_") and not name.endswith("__") and name not in VIEWS
        if func in SIZES:
            whole = torch.empty(_whole_shape(found[0]), dtype=found[0][0].dtype, device="meta")
            return func(whole, *args[1:], **kwargs)
        if name in DRAWS and leaves[0] is found[0][0]:
            return self._draw(func, args, kwargs, found[0])
        if changes:
            return self._change(func, args, kwargs, leaves[0])
        if func is Tensor.unsqueeze or func is torch.unsqueeze:  # numbers of rows, to be read next to the rows
            return self._unsqueezed(func, args, kwargs, found[0])
        if name in VIEWS:
            _refuse(found[0][1], name)
        if name in DIM_AT and (dims := _dims_without(_dims(name, args, kwargs), found[0])):
            return self._reduced(func(*args, **kwargs), dims, found[0])
        if name not in READS and not draws(func):
            with contextlib.suppress(RuntimeError, ValueError, IndexError):  # of a part next to something whole
                here = pytree.tree_map(functools.partial(self._beside, self._foreign(leaves, found)), (args, kwargs))
                out = func(*here[0], **here[1])
                if not tensors_in(out) or (is_elementwise(func) and self._is_alike(out, leaves, found[0])):
                    return out
        return func(*pytree.tree_map(self._whole, args), **pytree.tree_map(self._whole, kwargs))

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The graph has parts, and gradients are those of parts."""
        out = func(*args, **kwargs)
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        for gradient, one in zip(tensors_in(out), tensors_in(inputs), strict=False):
            known = self._known.of(one)
            if known is not None:
                self._known.note(gradient, known[1])
        return out

    def _draw(self, func: Any, args: Any, kwargs: Any, found: tuple[Tensor, Owned]) -> Any:
        """This rank's part of numbers that are drawn for the whole: every rank draws them all."""
        part, owned = found
        whole = torch.empty(_whole_shape(found), dtype=part.dtype, device=part.device)
        args, kwargs = pytree.tree_map(lambda leaf: whole if leaf is part else leaf, (args, kwargs))
        mine = _cut(func(*args, **kwargs), owned)
        if func.__name__.endswith("_"):
            is_init = getattr(func, "__module__", None) == init.__name__
            with torch.no_grad() if is_init else nullcontext():  # as `torch.nn.init` does inside
                return part.copy_(mine)
        self._known.note(mine, owned)
        return mine

    def _change(self, func: Any, args: Any, kwargs: Any, target: Tensor) -> Any:
        """A change in place: of a part, by parts; of something else, by what is whole."""
        known = self._known.of(target)
        if known is not None:
            part, owned = known
            if not is_elementwise(func):
                return part.copy_(_cut(func(*pytree.tree_map(self._whole, args), **kwargs), owned))
            return func(
                *pytree.tree_map(lambda leaf: _fitting(leaf, part, owned), args),
                **pytree.tree_map(lambda leaf: _fitting(leaf, part, owned), kwargs),
            )
        parts = [known for leaf in tensors_in((args, kwargs)) if (known := self._known.of(leaf)) is not None]
        by_parts = is_elementwise(func) and any(own_shape(target) == part.shape for part, _ in parts)
        if by_parts or not isinstance(args[0], Tensor):
            # What refuses tensors that it does not know (a part of an optimizer's state) knows those of its own class.
            return func(*pytree.tree_map(functools.partial(self._like, target), args), **kwargs)
        return func(*pytree.tree_map(self._whole, args), **pytree.tree_map(self._whole, kwargs))

    def _foreign(self, leaves: list[Tensor], found: list[tuple[Tensor, Owned]]) -> Tensor | None:
        """A tensor of another class, in the shape of a part, that a part is read next to (a part of an optimizer's state)."""
        shapes = {own_shape(part) for part, _ in found}
        others = (leaf for leaf in leaves if type(leaf) not in PLAIN and self._known.of(leaf) is None)
        return next((leaf for leaf in others if own_shape(leaf) in shapes), None)

    def _beside(self, foreign: Tensor | None, value: Any) -> Any:
        return self._spread(value) if foreign is None else self._like(foreign, value)

    def _like(self, target: Tensor, value: Any) -> Any:
        """A part that a tensor of another class is changed by, as of that class; one that dispatches by itself is no view of it."""
        kind = type(target)
        is_known = isinstance(value, Tensor) and self._known.of(value) is not None
        is_view = kind not in PLAIN and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        return value.as_subclass(kind) if is_known and is_view else value

    def _is_alike(self, out: Any, leaves: list[Tensor], first: tuple[Tensor, Owned]) -> bool:
        """Whether everything that came out has the shape of a part that went in; it is known from then on."""
        made = tensors_in(out)
        sources = [self._known.of(leaf) for leaf in leaves[: len(made)]] if len(made) > 1 else [first] * len(made)
        pairs = list(zip(made, sources, strict=False))
        if len(pairs) < len(made) or not all(
            source is None or own_shape(t) == own_shape(source[0]) for t, source in pairs
        ):
            return False
        for tensor, source in pairs:
            if source is not None:
                self._known.note(tensor, source[1])
        return True

    def _reduced(self, out: Any, dims: tuple[int, ...], found: tuple[Tensor, Owned]) -> Any:
        """Rows of parts, say, are parts of the rows of the whole."""
        part, owned = found
        for tensor in tensors_in(out):
            gone = 0 if tensor.ndim == part.ndim else sum(dim < owned.spec.dim for dim in dims)
            self._known.note(tensor, replace(owned, spec=replace(owned.spec, dim=owned.spec.dim - gone)))
        return out

    def _unsqueezed(self, func: Any, args: Any, kwargs: Any, found: tuple[Tensor, Owned]) -> Any:
        owned = found[1]
        out = func(*args, **kwargs)
        place = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.ndim
        dim = owned.spec.dim + (place <= owned.spec.dim)
        self._known.note(out, replace(owned, spec=replace(owned.spec, dim=dim)))
        return out

    def _spread(self, value: Any) -> Any:
        """A whole tensor that is read next to parts: its gradient is summed over the ranks, each of which has the summand of its part."""
        if not isinstance(value, Tensor) or self._known.of(value) is not None:
            return value
        return copy_to_tp(value, self._reads.copy.group)

    def _whole(self, value: Any) -> Any:
        known = self._known.of(value) if isinstance(value, Tensor) else None
        return value if known is None else self._known.whole(*known)


def _asked_by_user() -> bool:
    """Whether the function outside of torch that called is neither ours nor of a library that works on parts.

    Torch itself works on parts where it loads a state dict, which has parts.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_globals.get("__name__", "") + ".").startswith(PASSING):
        if frame.f_code.co_name == "_load_from_state_dict":
            return False
        frame = frame.f_back
    return not (frame.f_globals.get("__name__", "") + ".").startswith(LIBRARIES)


def _dims(name: str, args: Any, kwargs: Any) -> Any:
    given = kwargs.get("dim", kwargs.get("axis"))
    return args[DIM_AT[name]] if given is None and len(args) > DIM_AT[name] else given


def _dims_without(dims: Any, found: tuple[Tensor, Owned]) -> tuple[int, ...]:
    """The dimensions, from 0, that a reduction is over; none if the sharded one is among them: else it is right on the part."""
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims:
        return ()
    counted = tuple(dim % found[0].ndim for dim in dims)
    return () if found[1].spec.dim in counted else counted


def _whole_shape(found: tuple[Tensor, Owned]) -> list[int]:
    shape = list(found[0].shape)
    shape[found[1].spec.dim] = found[1].spec.full_size
    return shape


def _cut(whole: Tensor, owned: Owned) -> Tensor:
    return owned.spec.shard(whole, owned.reads.copy.group.size(), owned.reads.tp_rank)


def _fitting(value: Any, part: Tensor, owned: Owned) -> Any:
    """This rank's part of a tensor that has, along the sharded dimension, the size of the whole; others as they are."""
    along = owned.spec.dim - part.ndim
    if not isinstance(value, Tensor) or value.ndim < -along:
        return value
    size = own_shape(value)[along]
    if size == part.shape[along] or size != owned.spec.full_size:
        return value
    return _cut(value.expand(_whole_shape((part, owned))), owned)


def _refuse(owned: Owned, name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name} of parameter {owned.name} in a callback: this rank has only its part of it (cut along dim {owned.spec.dim}, "
        f"{owned.spec.full_size} in all), so rows and views are not those of the whole tensor. Change all of its elements, use a "
        f"mask of its own shape, or set {owned.setting} to keep it whole."
    )


def _refuse_draw() -> NoReturn:
    raise UnsupportedError(
        "random numbers for a parameter or gradient in a callback with tp_size above 1 and parameters shared out over replicas "
        "(zero.stage: 3): they would be drawn for this rank's shard, and not be those of one process. Set zero.stage to 1, or tp_size to 1."
    )


def _refuse_file(owned: Owned) -> NoReturn:
    raise UnsupportedError(
        f"parameter {owned.name} is written to a file in a callback: this rank has only its part of it (cut along dim "
        f"{owned.spec.dim}, {owned.spec.full_size} in all). Call accelerator.get_state_dict(model) on every rank, which gives rank 0 "
        "the whole model, or trainer.save_model(folder)."
    )


def shard_of(module: nn.Module, key: str, tensor: Tensor) -> Tensor | None:
    """The tensor that a state dict shows for a shard: itself, or the whole inside a loss of the user's.

    Args:
        module: Module that has the shard.
        key: Attribute of the module that is the shard.
        tensor: The shard, or None is the answer.
    """
    owned: Owned | None = vars(module).get("tp_owned", {}).get(key)
    return stand_in(owned, tensor) if owned is not None and owned.reads.in_loss else tensor if owned else None


def watch_calls(call: Callable[..., Any], known: KnownParts | None) -> Callable[..., Any]:
    """`call`, which calls code of users on all tensor-parallel ranks alike, made to notice what that does with parts."""
    if known is None:
        return call

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if known.reads.watching is not None or known.reads.depth:
            return call(*args, **kwargs)
        with OnParts(known):
            return call(*args, **kwargs)

    return called
