"""Callbacks of users that compute with `model.parameters()`, of which tensor-parallel ranks hold parts.

What changes or makes single elements is right on parts, and runs on them; numbers drawn for a part, and tensors in the shape
of the whole, are cut. Anything else (a norm, a mean, a count of elements) means the whole tensor and is given it; all ranks must
then do the same, as callbacks do. Rows and views of a part are refused by name: they would be other rows on each rank.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_torch import no_torch_function, own_parameters
from hf_parallel.compat.torch_tools import pytree
from hf_parallel.errors import UnsupportedError
from hf_parallel.tensor_parallel.run.whole_tensors import Owned, gathered


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
        *("index_fill_", "index_copy_", "index_add_", "masked_select", "__iter__", "unsqueeze", "squeeze", "reshape"),
        *("view_as", "reshape_as"),
    }
)
# Draw as many numbers as the whole has, whatever they begin from.
DRAWS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
)
DRAWS |= {"kaiming_uniform_", "rand_like", "randn_like", "randint_like"}
SIZES = frozenset({Tensor.numel, Tensor.nelement, Tensor.size, Tensor.__len__, Tensor.shape.__get__})  # type: ignore[attr-defined]
READS = frozenset({"numpy", "tolist", "__array__", "bernoulli", "dropout"})  # mean the whole of a part
LIBRARIES = ("hf_parallel.", "transformers.", "accelerate.", "safetensors.", "peft.")


class OnParts(TorchFunctionMode):
    """Notices what user code does with this rank's parts of parameters.

    Args:
        parts: The parameters, and how they are sharded; at least one.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Owned]]) -> None:
        super().__init__()
        self._reads = parts[0][1].reads
        self._known = {id(tensor): (tensor, owned) for tensor, owned in parts}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [self._known[id(leaf)] for leaf in leaves if id(leaf) in self._known]
        name = getattr(func, "__name__", "")
        changes = name.endswith("_") and not name.endswith("__") and name not in VIEWS
        # A forward pass that a callback runs (an evaluation) works on parts.
        if not found or self._reads.depth or not _asked_by_user():
            return func(*args, **kwargs)
        if func in SIZES:
            return func(torch.empty(_whole_shape(found[0]), device="meta"), *args[1:], **kwargs)
        if name in DRAWS and leaves[0] is found[0][0]:
            return self._draw(func, args, kwargs, found[0])
        if changes:
            return self._change(func, args, kwargs, leaves[0])
        if name in VIEWS:
            _refuse(found[0][1], name)
        if name in DIM_AT and _leaves_out(_dims(name, args, kwargs), found[0]):
            return func(*args, **kwargs)
        if name not in READS:
            with contextlib.suppress(RuntimeError):  # of a part next to something whole
                out = func(*args, **kwargs)
                if self._is_alike(out, leaves, found[0]):
                    return out
        return func(*pytree.tree_map(self._whole, args), **pytree.tree_map(self._whole, kwargs))

    def _draw(self, func: Any, args: Any, kwargs: Any, found: tuple[Tensor, Owned]) -> Any:
        """This rank's part of numbers that are drawn for the whole: every rank draws them all."""
        part, owned = found
        whole = torch.empty(_whole_shape(found), dtype=part.dtype, device=part.device)
        args, kwargs = pytree.tree_map(lambda leaf: whole if leaf is part else leaf, (args, kwargs))
        mine = _cut(func(*args, **kwargs), owned)
        if func.__name__.endswith("_"):
            return part.copy_(mine)
        self._known[id(mine)] = mine, owned
        return mine

    def _change(self, func: Any, args: Any, kwargs: Any, target: Tensor) -> Any:
        """A change in place: of a part, by parts; of something else, by what is whole."""
        known = self._known.get(id(target))
        if known is not None:
            part, owned = known
            return func(
                *pytree.tree_map(lambda leaf: _fitting(leaf, part, owned), args),
                **pytree.tree_map(lambda leaf: _fitting(leaf, part, owned), kwargs),
            )
        parts = [self._known[id(leaf)] for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self._known]
        if any(_here(target) == part.shape for part, _ in parts) or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        return func(*pytree.tree_map(self._whole, args), **pytree.tree_map(self._whole, kwargs))

    def _is_alike(self, out: Any, leaves: list[Tensor], first: tuple[Tensor, Owned]) -> bool:
        """Whether everything that came out has the shape of a part that went in; it is known from then on."""
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        sources = [self._known.get(id(leaf)) for leaf in leaves[: len(made)]] if len(made) > 1 else [first] * len(made)
        pairs = list(zip(made, sources, strict=False))
        if len(pairs) < len(made) or not all(source is None or _here(t) == _here(source[0]) for t, source in pairs):
            return False
        for tensor, source in pairs:
            if source is not None and type(tensor) in (Tensor, nn.Parameter):
                self._known[id(tensor)] = tensor, source[1]
        return True

    def _whole(self, value: Any) -> Any:
        known = self._known.get(id(value))
        if known is None:
            return value
        with no_torch_function():
            return gathered(known[1], known[0].detach())


def _asked_by_user() -> bool:
    """Whether the function outside of torch that called is neither ours nor of a library that works on parts.

    Torch itself works on parts where it loads a state dict, which has parts.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_globals.get("__name__", "") + ".").startswith(
        ("torch.", "contextlib.")
    ):
        if frame.f_code.co_name == "_load_from_state_dict":
            return False
        frame = frame.f_back
    return not (frame.f_globals.get("__name__", "") + ".").startswith(LIBRARIES)


def _dims(name: str, args: Any, kwargs: Any) -> Any:
    given = kwargs.get("dim", kwargs.get("axis"))
    return args[DIM_AT[name]] if given is None and len(args) > DIM_AT[name] else given


def _leaves_out(dims: Any, found: tuple[Tensor, Owned]) -> bool:
    """Whether a reduction is over other dimensions than the one that is sharded: then it is right on the part."""
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims:
        return False
    return found[1].spec.dim not in {dim % found[0].ndim for dim in dims}


def _whole_shape(found: tuple[Tensor, Owned]) -> list[int]:
    shape = list(found[0].shape)
    shape[found[1].spec.dim] = found[1].spec.full_size
    return shape


def _here(tensor: Tensor) -> torch.Size:
    """The shape of what this rank has, also of a gradient that tells the sizes of the whole."""
    shape: torch.Size = Tensor.shape.__get__(tensor)  # type: ignore[attr-defined]
    return shape


def _cut(whole: Tensor, owned: Owned) -> Tensor:
    return owned.spec.shard(whole, owned.reads.copy.group.size(), owned.reads.tp_rank)


def _fitting(value: Any, part: Tensor, owned: Owned) -> Any:
    """This rank's part of a tensor that has, along the sharded dimension, the size of the whole; others as they are."""
    along = owned.spec.dim - part.ndim
    if not isinstance(value, Tensor) or value.ndim < -along:
        return value
    size = _here(value)[along]
    if size == part.shape[along] or size != owned.spec.full_size:
        return value
    return _cut(value.expand(_whole_shape((part, owned))), owned)


def _refuse(owned: Owned, name: str) -> NoReturn:
    module = owned.name.rpartition(".")[0]
    raise UnsupportedError(
        f"{name} of parameter {owned.name} in a callback: this rank has only its part of it (cut along dim {owned.spec.dim}, "
        f"{owned.spec.full_size} in all), so rows and views are not those of the whole tensor. Change all of its elements, use a "
        f"mask of its own shape, or set tensor_parallel.plan: {{{module}: replicate}} to keep it whole."
    )


def watch_calls(call: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """`call`, which calls code of users on all tensor-parallel ranks alike, made to notice what that does with parts."""
    parts = []
    for module in model.modules():
        for key, owned in vars(module).get("tp_owned", {}).items():
            tensor = own_parameters(module).get(key)
            if tensor is not None:
                parts.append((tensor, owned))
    if not parts:
        return call

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with OnParts(parts):
            return call(*args, **kwargs)

    return called
