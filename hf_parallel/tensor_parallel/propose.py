"""Proposals for a column -> row pair: candidate layouts, and changes to what the block believes about its own size.

A proposal is only a guess; `verify` decides with numbers. Guesses look at sizes and at attribute names that mean a
count of heads or a width in most modeling code, never at the architecture. Order matters: the first that verifies
wins, so the ones that change least come first.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

from torch import Tensor, nn

from hf_parallel.tensor_parallel.layout import Section, ShardSpec
from hf_parallel.tensor_parallel.plan import AttributeRewrite, InputRule
from hf_parallel.tensor_parallel.trace import LinearInfo, map_tensors


HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_head", "n_heads", "num_q_heads", "h")
HEADS = re.compile(r"heads?($|_)|^h$")
GROUPS = re.compile(r"num_key_value_groups|n_rep|num_queries_per")
NOT_A_COUNT = re.compile(r"dim|size|group|idx|index")
NOT_A_WIDTH = re.compile(r"layer|vocab|position|idx|index|head_dim|head_size")


class Change(Flag):
    """What a proposal rewrites besides the linear weights."""

    NONE = 0
    HEADS = auto()  # integer attributes that count heads, parameters and buffers with one entry per head
    GROUPS = auto()  # integer attributes that count key/value groups or repeats
    CONFIG = auto()  # head counts in a private copy of the config
    WIDTHS = auto()  # integer attributes equal to a width that is cut
    INPUTS = auto()  # inputs of the block with a heads dim (attention biases)


CHANGES = (
    Change.NONE,
    Change.HEADS,
    Change.HEADS | Change.GROUPS,
    Change.HEADS | Change.CONFIG,
    Change.HEADS | Change.WIDTHS,
    Change.HEADS | Change.WIDTHS | Change.CONFIG,
    Change.HEADS | Change.WIDTHS | Change.GROUPS,
    Change.HEADS | Change.INPUTS,
    Change.HEADS | Change.WIDTHS | Change.INPUTS,
)


@dataclass(frozen=True)
class Candidate:
    """A producer/consumer group found by the trace; all names are relative to the module `root`."""

    root: str
    columns: tuple[str, ...]
    row: str


@dataclass(frozen=True)
class Proposal:
    """One guess; names are relative to the root. See `PairPlan` for the fields."""

    layouts: tuple[tuple[str, ShardSpec], ...]
    row: ShardSpec
    rewrites: tuple[AttributeRewrite, ...]
    sliced: tuple[tuple[str, ShardSpec], ...]
    inputs: tuple[InputRule, ...]


def proposals(
    root: nn.Module,
    candidate: Candidate,
    linears: Mapping[str, LinearInfo],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    tp_size: int,
) -> Iterator[Proposal]:
    """All distinct proposals for `candidate`, the least invasive first.

    Args:
        root: The module that contains the pair.
        candidate: The pair.
        linears: Linears of the model by name relative to `root`.
        arguments: Positional and keyword arguments of a call of `root`.
        tp_size: Number of ranks, >= 2.
    """
    sites = _sites(root, candidate)
    heads = _head_count(sites)
    row = linears[candidate.row]
    widths = {linears[name].out_features for name in candidate.columns} | {row.in_features}
    seen = set()
    for layouts in _layouts(candidate, linears, tp_size):
        cut = widths | {section.size for _, spec in layouts for section in spec.sections}
        for change in CHANGES:
            proposal = Proposal(
                layouts=layouts,
                row=ShardSpec.contiguous(row.in_dim, row.in_features),
                rewrites=_rewrites(sites, change, cut, tp_size),
                sliced=_per_head_tensors(sites, heads, linears, tp_size) if Change.HEADS in change else (),
                inputs=_per_head_inputs(arguments, heads, tp_size) if Change.INPUTS in change else (),
            )
            if proposal not in seen:
                seen.add(proposal)
                yield proposal


def set_integer(module: nn.Module, attribute: str, value: int) -> None:
    """Set `attribute` of `module`; `config.<key>` sets a key of a config that only this module sees."""
    holder, _, key = attribute.rpartition(".")
    if not holder:
        setattr(module, key, value)
        return
    private = copy.copy(getattr(module, holder))
    private.__dict__[key] = value
    setattr(module, holder, private)


def _layouts(
    candidate: Candidate, linears: Mapping[str, LinearInfo], tp_size: int
) -> Iterator[tuple[tuple[str, ShardSpec], ...]]:
    width = linears[candidate.row].in_features
    sizes = {name: linears[name].out_features for name in candidate.columns}

    def sections(name: str, *parts: tuple[int, bool]) -> tuple[str, ShardSpec]:
        return name, ShardSpec(linears[name].out_dim, tuple(Section(size, sharded) for size, sharded in parts))

    if min(width, *sizes.values()) < tp_size:
        return
    yield tuple(sections(name, (size, True)) for name, size in sizes.items())
    if len(sizes) > 1:
        largest = max(sizes.values())
        yield tuple(sections(name, (size, size == largest)) for name, size in sizes.items())
        return
    (name, size), rest = *sizes.items(), max(0, *sizes.values()) - width
    if size in (2 * width, 3 * width):
        yield (sections(name, *[(width, True)] * (size // width)),)
    if rest > 0 and rest % 2 == 0:
        for split in (True, False):
            yield (sections(name, (width, True), (rest // 2, split), (rest // 2, split)),)


def _sites(root: nn.Module, candidate: Candidate) -> dict[str, nn.Module]:
    """The root and every module between it and the linears: those whose code sees the local widths."""
    sites = {"": root}
    for name in (*candidate.columns, candidate.row):
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            sites[path] = root.get_submodule(path)
    return sites


def _integers(module: Any) -> dict[str, int]:
    return {k: v for k, v in vars(module).items() if type(v) is int and v > 1 and not k.startswith("_")}


def _counts_heads(name: str) -> bool:
    return bool(HEADS.search(name)) and not NOT_A_COUNT.search(name)


def _head_count(sites: Mapping[str, nn.Module]) -> int:
    """Number of attention heads the block believes in; 0 if it does not say."""
    for module in sites.values():
        config = vars(module).get("config")
        # vars, not getattr: configs compute attributes, and some raise for those that vary between layers
        integers = {**({} if config is None else _integers(config)), **_integers(module)}
        for name in HEAD_COUNT_NAMES:
            if name in integers:
                return integers[name]
    return 0


def _rewrites(
    sites: Mapping[str, nn.Module], change: Change, widths: set[int], tp_size: int
) -> tuple[AttributeRewrite, ...]:
    rewrites = []
    for path, module in sites.items():
        for name, value in _integers(module).items():
            counts_heads = _counts_heads(name)
            is_width = not counts_heads and value in widths and not NOT_A_WIDTH.search(name)
            wanted = (
                (Change.HEADS in change and counts_heads)
                or (Change.GROUPS in change and GROUPS.search(name))
                or (Change.WIDTHS in change and is_width)
            )
            if wanted and value % tp_size == 0:
                rewrites.append(AttributeRewrite(path, name, value // tp_size))
        config = vars(module).get("config")
        if Change.CONFIG in change and config is not None:
            for name, value in _integers(config).items():
                if _counts_heads(name) and value % tp_size == 0:
                    rewrites.append(AttributeRewrite(path, f"config.{name}", value // tp_size))
    return tuple(rewrites)


def _per_head_tensors(
    sites: Mapping[str, nn.Module], heads: int, linears: Mapping[str, LinearInfo], tp_size: int
) -> tuple[tuple[str, ShardSpec], ...]:
    """Parameters and buffers of the sites with one entry per head along dim 0 (attention sinks, slopes)."""
    if not heads or heads % tp_size:
        return ()
    found = []
    for path, module in sites.items():
        if path in linears:
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.ndim >= 1 and tensor.shape[0] == heads:
                found.append((f"{path}.{name}" if path else name, ShardSpec.contiguous(0, heads)))
    return tuple(found)


def _per_head_inputs(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], heads: int, tp_size: int
) -> tuple[InputRule, ...]:
    """Inputs with a heads dim: the third from the end, or dim 0 that folds batch and heads."""
    if not heads or heads % tp_size:
        return ()
    tensors: list[tuple[tuple[str | int, ...], Tensor]] = []
    for part in arguments:
        map_tensors(lambda path, tensor: tensors.append((path, tensor)), part)
    batch = tensors[0][1].shape[0] if tensors and tensors[0][1].ndim else 0
    rules = []
    for path, tensor in tensors:
        if tensor.ndim >= 3 and tensor.shape[-3] == heads:
            rules.append(InputRule(path, -3, heads))
        elif tensor.ndim >= 3 and tensor.shape[0] == batch * heads:
            rules.append(InputRule(path, 0, heads))
    return tuple(rules)
