"""Attributes a block reads while it runs, and the values they need on a rank.

Guesses look at sizes and at names that mean a count of heads or groups in most modeling code, never at the
architecture; `verify` decides with numbers. Only what the forward reads is rewritten.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from hf_parallel.compat.torch_tools import ConvModule
from hf_parallel.tensor_parallel.plan.influence import Block
from hf_parallel.tensor_parallel.plan.trace import replaced
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite


COUNTS = re.compile(r"heads?($|_)|^h$|n_?groups$|num_groups$|head_groups$")
KEY_VALUES = re.compile(r"kv|key_value")
REPEATS = re.compile(r"num_key_value_groups|n_rep|num_queries_per|kv_groups|gqa")
NOT_A_COUNT = re.compile(r"dim|size|idx|index")
NOT_A_WIDTH = re.compile(r"layer|vocab|position|idx|index|head_dim|head_size|state_size|chunk|kernel|window|^_")
MOST_SUBSETS = 5  # of this many options every combination is tried
Values = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Full extents in a block and what a rank has of them.

    Args:
        width: Input width of the row, and its per-rank parts.
        columns: Output widths of the columns and their parts, the narrowest first.
        exact: Every extent of something that is split -> its parts.
    """

    width: tuple[int, tuple[int, ...]]
    columns: tuple[tuple[int, tuple[int, ...]], ...]
    exact: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Option:
    """A rewrite that may be needed, and why it was thought of."""

    kind: str
    rewrite: AttributeRewrite
    value: int = 0


def attributes_read(block: Block) -> dict[str, set[str]]:
    """Module -> names of the integers, and sequences of them, its code reads in a call; `config.<key>` included."""
    read: dict[str, set[str]] = {}
    with contextlib.ExitStack() as stack:
        for path, module in block.module.named_modules():
            names = read.setdefault(path, set())
            stack.enter_context(_watched(module, names, ""))
            config = vars(module).get("config")
            if config is not None:
                private = copy.copy(config)
                stack.enter_context(replaced(module, "config", private))
                stack.enter_context(_watched(private, names, "config."))
        args, kwargs = block.arguments
        with torch.no_grad():
            block.module(*args, **kwargs)
    return read


@contextlib.contextmanager
def _watched(holder: Any, names: set[str], prefix: str) -> Iterator[None]:
    kind = type(holder)

    def look_up(self: Any, name: str) -> Any:
        names.add(prefix + name)
        return super(watching, self).__getattribute__(name)

    try:
        watching: Any = type(kind.__name__, (kind,), {"__getattribute__": look_up})
        holder.__class__ = watching
    except TypeError:  # a class with another memory layout cannot be watched: nothing of it is rewritten
        yield
        return
    try:
        yield
    finally:
        holder.__class__ = kind


def rewrite_sets(options: list[Option]) -> Iterator[tuple[AttributeRewrite, ...]]:
    """Sets of rewrites worth trying, the likely ones first; all contain those of kind "own"."""
    kinds = [(), ("heads",), ("heads", "repeats"), ("heads", "repeats", "widths"), ("heads", "widths"), ("widths",)]
    tried: list[tuple[AttributeRewrite, ...]] = []

    def once(chosen: list[Option]) -> Iterator[tuple[AttributeRewrite, ...]]:
        rewrites = tuple(option.rewrite for option in chosen)
        names = [(rewrite.module, rewrite.attribute) for rewrite in rewrites]
        if rewrites not in tried and len(set(names)) == len(names):
            tried.append(rewrites)
            yield rewrites

    def chosen_first(accepted: Iterable[Option]) -> list[Option]:
        first: dict[tuple[str, str], Option] = {}
        for option in accepted:
            first.setdefault((option.rewrite.module, option.rewrite.attribute), option)
        return list(first.values())

    for wanted in kinds:
        yield from once(chosen_first(o for o in options if o.kind == "own" or o.kind in wanted))
    # A small number equals another by accident more easily than a large one.
    for least in sorted({option.value for option in options if option.kind == "widths"}):
        for wanted in kinds[3:]:
            kept = [
                o for o in options if o.kind == "own" or (o.kind in wanted and (o.kind != "widths" or o.value > least))
            ]
            yield from once(chosen_first(kept))
    own = [option for option in options if option.kind == "own"]
    free = [option for option in options if option.kind != "own"]
    for count in range(1, len(free)) if len(free) <= MOST_SUBSETS else (1, len(free) - 1):
        for chosen in combinations(free, count):
            yield from once([*own, *chosen])


def rewrite_options(
    sites: Mapping[str, nn.Module], owners: set[str], read: Mapping[str, set[str]], sizes: Sizes
) -> list[Option]:
    """Everything that may have to change in the modules `sites`; `owners` hold tensors that are split."""
    options: list[Option] = []
    for path, module in sites.items():
        if type(module).__module__.startswith("torch.nn"):
            if path in owners and isinstance(module, ConvModule):
                options += _convolution(path, module, sizes)
            continue
        named = dict(vars(module))
        config = named.get("config")
        named |= {f"config.{key}": value for key, value in vars(config).items()} if config is not None else {}
        for name in sorted(read.get(path, set()) & set(named)):
            options += [
                Option(kind, AttributeRewrite(path, name, values), named[name] if type(named[name]) is int else 0)
                for kind, values in _values(name.rpartition(".")[2], named[name], sizes)
            ]
    return options


def _convolution(path: str, module: ConvModule, sizes: Sizes) -> Iterator[Option]:
    """A grouped convolution of fewer channels."""
    parts = sizes.exact.get(module.out_channels)
    if parts is None:
        return
    for name in ("out_channels", "in_channels", "groups"):
        values = _scaled(getattr(module, name), (module.out_channels, parts), (1, (1,) * len(parts)))
        if values is not None and module.groups > 1:
            yield Option("own", AttributeRewrite(path, name, values))


def _values(name: str, value: Any, sizes: Sizes) -> Iterator[tuple[str, Values]]:
    """Kinds of change and values on the ranks for one attribute."""
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        ranks = range(len(sizes.width[1]))
        mapped = tuple(tuple(sizes.exact[v][r] if v in sizes.exact else v for v in value) for r in ranks)
        if any(part != tuple(value) for part in mapped):
            yield "widths", mapped
        return
    if type(value) is not int or value < 2:
        return
    if REPEATS.search(name):
        found = [_scaled(value, sizes.width, other) for other in sizes.columns]
        yield from (("repeats", values) for values in dict.fromkeys(found) if values and set(values) != {value})
        return
    if COUNTS.search(name) and not NOT_A_COUNT.search(name):
        known = [*sizes.columns, sizes.width] if KEY_VALUES.search(name) else [sizes.width, *sizes.columns]
        found = [_scaled(value, (full, parts), (1, (1,) * len(parts))) for full, parts in known]
        yield from (("heads", values) for values in dict.fromkeys(found) if values and set(values) != {value})
    elif value in sizes.exact and (value == sizes.width[0] or not NOT_A_WIDTH.search(name)):
        yield "widths", sizes.exact[value]


def _scaled(value: int, up: tuple[int, tuple[int, ...]], down: tuple[int, tuple[int, ...]]) -> tuple[int, ...] | None:
    """`value` in proportion to each rank's share of `up` over its share of `down`, if that is whole and not zero."""
    values = []
    for mine, other in zip(up[1], down[1], strict=True):
        numerator, denominator = value * mine * down[0], up[0] * other
        if not denominator or numerator % denominator or not numerator:
            return None
        values.append(numerator // denominator)
    return tuple(values)
