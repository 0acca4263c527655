"""Logits that are made when they are read: to code that computes a loss they are a tensor, which has no memory.

Such a tensor knows hidden states, the head's weight and what was done to its elements since (a scale, a soft-cap, a cast).
`cross_entropy` of it is computed in tiles. Anything else that reads its values makes them, with their graph, and goes on
with an ordinary tensor: whatever the code does, its results are those of ordinary logits.

Extents: S positions and what is before them, N of them in all, H hidden, V vocabulary (of one rank, where ranks share it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_parallel.compat.private_torch import is_cross_entropy, no_torch_function, version_of, without_memory
from hf_parallel.compat.torch_tools import pytree
from hf_parallel.errors import UnsupportedError
from hf_parallel.head.tiles import Head, Step, tiled_loss


# Functions that compute each element from that element, by name; with one number beside them where they take one.
ELEMENTWISE = frozenset(
    {
        "mul",
        "multiply",
        "rmul",
        "div",
        "divide",
        "true_divide",
        "truediv",
        "add",
        "radd",
        "sub",
        "subtract",
        "tanh",
        "neg",
    }
    | {"float", "half", "bfloat16", "double", "to", "type", "contiguous", "clone"}
)
IN_PLACE_OPERATORS = frozenset({"imul", "itruediv", "iadd", "isub"})
SHAPES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze"})
# What is known without values.
FACTS = frozenset(
    {"size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "element_size", "get_device"}
    | {"is_contiguous", "__len__", "requires_grad_", "is_inference", "is_signed", "ndimension", "is_same_size"}
)
FACT_ATTRIBUTES = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "ndim",
        "layout",
        "grad",
        "output_nr",
        "itemsize",
    }
    | {"is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "names", "nbytes", "retains_grad"}
)
WATCHES = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})


@dataclass
class Reads:
    """Counts how the logits of one forward were used: in tiles, or made.

    Args:
        tiled: Losses that were computed in tiles.
        made: Functions that made them, by name.
        on_made: Called with logits that were made.
        watched: Whether their gradient is asked for.
        version: Number of writes to the head's weight before that forward.
    """

    version: int
    tiled: int = 0
    made: list[str] = field(default_factory=list)
    on_made: Callable[[Tensor], None] | None = None
    watched: bool = False


@dataclass
class Recipe:
    """Makes the logits of a tensor without memory when they are needed.

    Args:
        hidden: f[... H].
        head: Makes logits of it.
        reads: Shared by all tensors of one forward.
        is_shared: Whether another tensor was made of rows of this one, which would not see a change in place.
    """

    hidden: Tensor
    head: Head
    reads: Reads
    is_shared: bool = False
    _made: Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Whether the logits exist; they may have been changed in place since."""
        return self._made is not None

    def made(self) -> Tensor:
        """The logits f[... V], the same tensor every time."""
        if self._made is None:
            self.refuse_new_weight()
            with torch.enable_grad():
                self._made = self.head.logits(self.hidden)
            if self.reads.on_made is not None:
                self.reads.on_made(self._made)
        return self._made

    def refuse_new_weight(self) -> None:
        """Refuse to make logits of a head that was updated since its forward."""
        if version_of(self.head.weight) != self.reads.version:
            raise UnsupportedError(
                "outputs.logits was read after the head's weight had changed (after optimizer.step()): its loss was computed without "
                "logits, and they would be made with the new weight. Read them before the step (logits = outputs.logits.detach()), "
                "or set chunked_loss: false."
            )

    def then(self, step: Step) -> Recipe:
        """A recipe with one more step."""
        return Recipe(self.hidden, replace(self.head, steps=(*self.head.steps, step)), self.reads)


class UnmadeLogits(Tensor):
    """Logits f[... V] that are made when they are read; see the module."""

    recipe: Recipe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, cls):
            if name in FACTS or name in FACT_ATTRIBUTES:
                with no_torch_function():
                    return func(*args, **kwargs)
            if name in WATCHES:
                first._watch(name)
                with no_torch_function():
                    return func(*args, **kwargs)
            if _writes(name) and first.recipe.is_shared:
                raise UnsupportedError(
                    f"{name} changes logits in place of which a part was taken before. Set chunked_loss: false, or change a "
                    "copy (logits.clone())."
                )
            found = first._without_values(func, name, args, kwargs)
            if found is not None:
                return found
        made = pytree.tree_map_only(cls, lambda one: one._made_for(name), (args, kwargs))
        return func(*made[0], **made[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = pytree.tree_map_only(cls, lambda one: one._made_for(str(func)).detach(), (args, kwargs or {}))
        return func(*made[0], **made[1])

    def tiled_loss(self, targets: Tensor, ignored: int) -> Tensor:
        """Sum of the cross-entropies of all tokens that count, 0-d.

        Args:
            targets: i[N], tokens of the whole vocabulary.
            ignored: Target of tokens that do not count.
        """
        recipe = self.recipe
        recipe.reads.tiled += 1
        return tiled_loss(recipe.hidden.reshape(-1, recipe.hidden.shape[-1]), recipe.head, targets, ignored)

    def made(self) -> Tensor:
        """An ordinary tensor with these values."""
        return self._made_for("made")

    def _made_for(self, name: str) -> Tensor:
        recipe = self.recipe
        recipe.reads.made.append(name)
        if recipe.reads.watched and torch.is_grad_enabled():  # so that its gradient passes through here
            found: Tensor = _Real.apply(self, recipe)  # type: ignore[no-untyped-call]
            return found
        return recipe.made()

    def _watch(self, name: str) -> None:
        if self.recipe.reads.tiled:
            raise UnsupportedError(
                f"outputs.logits.{name}() after the loss was computed without logits: their gradient does not exist. Set "
                "chunked_loss: false, or call the model without labels and compute the loss from the logits."
            )
        self.recipe.reads.watched = True

    def _without_values(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that needs no values; None if it does."""
        if self.recipe.reads.watched or self.recipe.is_made:
            return None
        if is_cross_entropy(func):
            return self._cross_entropy(func, args, kwargs)
        if name == "__getitem__":
            return self._rows(args[1])
        if name in SHAPES:
            return self._reshaped(func, args, kwargs)
        if _plain(name) in ELEMENTWISE and all(_is_number(value) for value in (*args[1:], *kwargs.values())):
            return self._stepped(func, args, kwargs, in_place=_writes(name))
        return None

    def _stepped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, in_place: bool) -> Any:
        rest = tuple(value.clone() if isinstance(value, Tensor) else value for value in args[1:])

        def step(logits: Tensor) -> Tensor:
            out: Tensor = func(logits, *rest, **kwargs)
            return out

        here = torch.zeros(0, dtype=self.dtype, device=self.device)
        there = step(here)
        if not isinstance(there, Tensor) or there.device != here.device or not there.is_floating_point():
            return None
        if not in_place:
            return self if there is here else unmade(self.recipe.then(step))
        self.recipe.head = self.recipe.then(_out_of_place(step)).head
        return self

    def _rows(self, index: Any) -> Any:
        """Logits of the rows that an index takes if it takes the vocabulary whole; None for another index."""
        items = index if isinstance(index, tuple) else (index,)
        if any(isinstance(item, UnmadeLogits) for item in items):
            return None
        taken = [item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items]
        dims = sum(n for n, item in zip(taken, items, strict=True) if item is not None and item is not Ellipsis)
        reaches = dims == self.ndim or any(item is Ellipsis for item in items)
        if reaches and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
            return None
        return self._moved(self.recipe.hidden[index])

    def _reshaped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        shape = func(torch.empty(self.shape, dtype=torch.bool, device="meta"), *args[1:], **kwargs).shape
        if not shape or shape[-1] != self.shape[-1] or self.shape[-1] == 1:
            return None
        return self._moved(self.recipe.hidden.reshape(*shape[:-1], self.recipe.hidden.shape[-1]))

    def _moved(self, hidden: Tensor) -> UnmadeLogits:
        self.recipe.is_shared = True
        return unmade(Recipe(hidden, self.recipe.head, self.recipe.reads, is_shared=True))

    def _cross_entropy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        how, target = given.arguments, given.arguments["target"]
        is_plain = how["weight"] is None and how["size_average"] is None and how["reduce"] is None
        if not is_plain or how["label_smoothing"] or how["reduction"] not in ("mean", "sum"):
            return None
        fits = isinstance(target, Tensor) and target.dtype == torch.long and target.shape == self.shape[:-1]
        if not fits or self.ndim != 2 or self.recipe.head.tiling.columns is not None:
            return None
        total = self.tiled_loss(target, how["ignore_index"])
        if how["reduction"] == "mean":
            total = total / (target != how["ignore_index"]).sum()
        return total.to(self.dtype)


def unmade(recipe: Recipe) -> UnmadeLogits:
    """The logits of a recipe, not made, in the graph of the hidden states and the weight."""
    head = recipe.head
    made: UnmadeLogits = _Unmade.apply(recipe.hidden, head.weight, head.bias, recipe)  # type: ignore[no-untyped-call]
    made.recipe = recipe
    return made


class _Unmade(torch.autograd.Function):
    """The place of unmade logits in the graph, for gradients that reach it other than by `recipe`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Any:
        ctx.recipe = recipe
        dtype = recipe.head.dtype
        for step in recipe.head.steps:
            dtype = step(torch.zeros(0, dtype=dtype, device=hidden.device)).dtype
        return without_memory(UnmadeLogits, (*hidden.shape[:-1], weight.shape[0]), dtype, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        recipe: Recipe = ctx.recipe
        head, wanted = recipe.head, ctx.needs_input_grad[:3]
        hidden, weight = (
            one.detach().requires_grad_(needed)
            for one, needed in zip((recipe.hidden, head.weight), wanted[:2], strict=True)
        )
        bias = None if head.bias is None else head.bias.detach().requires_grad_(wanted[2])
        with torch.enable_grad():
            logits = replace(head, weight=weight, bias=bias).logits(hidden)
        asked = [leaf for leaf in (hidden, weight, bias) if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(logits, asked, grads[0]))
        return *(next(found) if needed else None for needed in wanted), None


class _Real(torch.autograd.Function):
    """Values of unmade logits, whose gradient goes back through them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, recipe: Recipe) -> Tensor:
        recipe.refuse_new_weight()
        with torch.no_grad():
            return recipe.head.logits(recipe.hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _out_of_place(step: Step) -> Step:
    """A change in place, to a copy: the product may be needed for its gradient."""
    return lambda logits: step(logits.clone())


def _name_of(func: Any) -> str:
    """Name of a function; for a property, name of the attribute."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _plain(name: str) -> str:
    """The name of a function without its underscores; of an operator in place, that of the operator."""
    inner = name.strip("_")
    return inner[1:] if inner in IN_PLACE_OPERATORS else inner


def _writes(name: str) -> bool:
    """Whether a function of that name changes its first argument."""
    inner = name.strip("_")
    return inner in IN_PLACE_OPERATORS or inner == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _is_number(value: Any) -> bool:
    """Whether a value is alike for all elements, and constant."""
    if isinstance(value, UnmadeLogits):
        return False
    if isinstance(value, Tensor):
        return not value.ndim and not value.requires_grad
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.memory_format))
