"""Addresses of tensors inside the python values that blocks take and return, and rebuilding such values.

A stage must put received tensors exactly where a block that lives elsewhere would have put them: in its return value, or
in a dict or object that it was passed. A path names such a place; a template is a return value with its tensors taken
out, so that it can be kept without keeping any activation alive.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn


Step = tuple[str, Any]  # ("key", dict key) | ("index", position) | ("attr", attribute name)
Path = tuple[Step, ...]

MAX_DEPTH = 6
OPAQUE = (str, bytes, int, float, bool, complex, type, nn.Module, torch.dtype, torch.device, torch.Generator)
CALLABLES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Place of a tensor; `source` is the argument it was, if the block returned an argument unchanged."""

    dtype: torch.dtype
    source: Path | None


@dataclasses.dataclass(frozen=True)
class Node:
    """A tuple, list or mapping of templates."""

    kind: type
    children: tuple[tuple[Step, Template], ...]


@dataclasses.dataclass(frozen=True)
class Const:
    """A value without tensors."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Argument:
    """A container or object (a cache, a state) that the block was passed and returned; it is returned as it is."""

    source: Path


Template = Leaf | Node | Const | Argument


def children(value: object) -> Iterator[tuple[Step, Any]]:
    """The (step, child) pairs of a container or of a plain object; nothing for anything else."""
    if value is None or isinstance(value, (Tensor, *OPAQUE, *CALLABLES)):
        return
    if isinstance(value, Mapping):
        for key, child in list(value.items()):
            yield ("key", key), child
    elif isinstance(value, (list, tuple)):
        for position, child in enumerate(value):
            yield ("index", position), child
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith("torch."):
        if type(value).__name__.endswith("Config"):  # a config holds no tensors and is large
            return
        for name, child in list(vars(value).items()):
            yield ("attr", name), child


def nodes(value: object, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """Every (path, value) below `value`, itself included, depth first; shared containers once."""
    yield path, value
    seen = set() if seen is None else seen
    if len(path) >= MAX_DEPTH or id(value) in seen:
        return
    if not isinstance(value, Tensor):
        seen.add(id(value))
    for step, child in children(value):
        yield from nodes(child, (*path, step), seen)


def leaves(value: object) -> Iterator[tuple[Path, Tensor]]:
    """Every (path, tensor) inside `value`."""
    for path, node in nodes(value):
        if isinstance(node, Tensor):
            yield path, node


def get_at(value: Any, path: Path) -> Any:
    """The object at `path`; KeyError, IndexError or AttributeError where there is none."""
    for kind, name in path:
        value = getattr(value, name) if kind == "attr" else value[name]
    return value


def set_at(value: Any, path: Path, leaf: Tensor) -> Any:
    """Put `leaf` at `path`, creating missing dicts and lists; returns the (possibly new) container.

    Tuples on the way are rebuilt and stored in their parent, everything else is changed in place.
    """
    if not path:
        return leaf
    (kind, name), rest = path[0], path[1:]
    if kind == "attr":
        setattr(value, name, set_at(getattr(value, name, None), rest, leaf))
        return value
    if kind == "key":
        mapping: MutableMapping[Any, Any] = {} if value is None else value
        mapping[name] = set_at(mapping.get(name), rest, leaf)
        return mapping
    items = list(value or ())
    items += [None] * (name + 1 - len(items))
    items[name] = set_at(items[name], rest, leaf)
    if isinstance(value, list):
        value[:] = items
        return value
    return make_sequence(type(value), items) if isinstance(value, tuple) else items


def make_sequence(kind: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of `items`."""
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def in_mutable(path: Path) -> bool:
    """Whether a write at this argument path is seen by the caller: some container below (args, kwargs) is shared."""
    return len(path) > 2


def template_of(value: object, arguments: Mapping[int, Path]) -> Template:
    """`value` with its tensors taken out.

    Args:
        value: what a block or a module returned.
        arguments: id -> path in (args, kwargs) of every object the block was passed.
    """
    source = arguments.get(id(value))
    if isinstance(value, Tensor):
        return Leaf(value.dtype, source)
    if value is None or isinstance(value, OPAQUE):
        return Const(value)
    if source is not None and not isinstance(value, tuple):
        return Argument(source)
    if isinstance(value, (Mapping, list, tuple)):
        return Node(type(value), tuple((step, template_of(child, arguments)) for step, child in children(value)))
    return Const(value if next(leaves(value), None) is None else None)


def leaf_paths(template: Template, path: Path = ()) -> Iterator[Path]:
    """Paths of the tensors that `rebuild` fills in."""
    if isinstance(template, Leaf):
        yield path
    elif isinstance(template, Node):
        for step, child in template.children:
            yield from leaf_paths(child, (*path, step))


def outline(template: Template) -> str:
    """Text of the facts in a template that decide what `rebuild` makes: kinds, keys, dtypes, hand-throughs, plain values."""
    if isinstance(template, Node):
        inner = ", ".join(f"{step}: {outline(child)}" for step, child in template.children)
        return f"{template.kind.__qualname__}({inner})"
    if isinstance(template, Const) and not isinstance(template.value, (str, bytes, int, float, type(None))):
        return f"const {type(template.value).__qualname__}"
    return repr(template)


def rebuild(template: Template, fill: Callable[[Path, Leaf], Any], arguments: Any, path: Path = ()) -> Any:
    """A value shaped like the template; `fill` gives the tensor of each leaf, `arguments` = (args, kwargs) of now."""
    if isinstance(template, Leaf):
        return fill(path, template)
    if isinstance(template, Const):
        return template.value
    if isinstance(template, Argument):
        return get_at(arguments, template.source)
    items = [(step, rebuild(child, fill, arguments, (*path, step))) for step, child in template.children]
    if issubclass(template.kind, (list, tuple)):
        return make_sequence(template.kind, [item for _, item in items])
    named = {step[1]: item for step, item in items}
    by_field = dataclasses.is_dataclass(template.kind)
    kind: Any = template.kind
    return kind(**named) if by_field else kind(named)
