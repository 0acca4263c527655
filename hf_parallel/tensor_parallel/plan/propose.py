"""Proposals for one row and what feeds it: how its input is cut, which layouts follow, which attributes change.

The layouts follow from the cut by measurement (`influence`), the attributes are guesses (`rewrites`); `verify` decides
with numbers. Order matters: the first proposal that verifies wins, so the ones that shard most and change least come
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_parallel.model.tensors import map_tensors
from hf_parallel.tensor_parallel.layout import Section, ShardSpec, split_units
from hf_parallel.tensor_parallel.plan.influence import (
    Arguments,
    Block,
    Influence,
    measure_parameter,
    measure_row,
    mixing_modules,
    ranges_used,
    sections_of,
    split_section,
)
from hf_parallel.tensor_parallel.plan.rewrites import (
    Sizes,
    attributes_read,
    rewrite_options,
    rewrite_sets,
)
from hf_parallel.tensor_parallel.shard_plan import InputRule, LinearPlan, PairPlan, Ranges
from hf_parallel.tensor_parallel.units import numbers_of, unit_sizes


HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_head", "n_heads", "num_q_heads", "h")


@dataclass(frozen=True)
class Candidate:
    """A row and what feeds it; all names are relative to the module `root`.

    Args:
        root: The innermost module that contains all of them.
        columns: Linears whose outputs reach the row without passing another linear, in call order.
        row: The row linear, or the module whose output is a sum over what `parameter` holds.
        feeds: Per column, those of the columns that reach its input.
        parameter: The parameter that acts as the row of fused experts; empty if the row is a linear.
        routed: Whether whole experts are to be distributed.
    """

    root: str
    columns: tuple[str, ...]
    row: str
    feeds: tuple[frozenset[str], ...] = ()
    parameter: str = ""
    routed: bool = False


@dataclass(frozen=True)
class Layouts:
    """Layouts that follow from one cut of the row's input."""

    linears: dict[str, LinearPlan]
    sliced: dict[str, ShardSpec]
    norms: dict[str, ShardSpec]
    sharded: float


@dataclass(frozen=True)
class Proposal:
    """One guess: linears by name and the pair, names relative to the root (the pair's own root is empty)."""

    linears: dict[str, LinearPlan]
    pair: PairPlan


def proposals(block: Block, candidate: Candidate, tp_size: int) -> Iterator[Proposal]:
    """All proposals for `candidate`, the most promising first.

    Args:
        block: Copy of the candidate's root.
        candidate: The row and its columns.
        tp_size: Number of ranks, >= 2.
    """
    read = attributes_read(block)
    source = _expert_layouts if candidate.parameter else _row_layouts
    for width, parts, layouts in source(block, candidate, tp_size):
        yield from _with_rewrites(block, candidate, layouts, (width, parts), read, tp_size)
        extended = _with_idle_heads(block, candidate, layouts, tp_size)
        if extended is not None:
            yield from _with_rewrites(block, candidate, extended, (width, parts), read, tp_size)


def _with_idle_heads(block: Block, candidate: Candidate, layouts: Layouts, tp_size: int) -> Layouts | None:
    """`layouts` with tensors of one entry per head on top that had no influence in the sample (a decay of zeros)."""
    heads = _head_count(_sites(block, candidate, set(), set()))
    if heads < tp_size:
        return None
    owners = {name.rpartition(".")[0] for name in layouts.sliced} | {""}
    tensors = [*block.module.named_parameters(), *block.module.named_buffers()]
    idle = {
        name: ShardSpec(0, (Section(heads, True, 0 if heads % tp_size else 1),))
        for name, tensor in tensors
        if name not in layouts.sliced
        and name.rpartition(".")[0] in owners - set(block.linears)
        and tensor.ndim
        and tensor.shape[0] == heads
    }
    return replace(layouts, sliced=layouts.sliced | idle) if idle else None


def _with_rewrites(
    block: Block,
    candidate: Candidate,
    layouts: Layouts,
    width: tuple[int, tuple[int, ...]],
    read: dict[str, set[str]],
    tp_size: int,
) -> Iterator[Proposal]:
    owners = {name.rpartition(".")[0] for name in layouts.sliced}
    sites = _sites(block, candidate, owners, set(layouts.norms))
    options = rewrite_options(sites, owners, read, _sizes(layouts, width, tp_size))
    inputs = _per_head_inputs(block.arguments, _head_count(sites), tp_size)
    base = PairPlan("", candidate.columns, candidate.row, sliced=layouts.sliced, norms=layouts.norms)
    pairs = [base]
    if candidate.parameter:
        holder = candidate.parameter.rpartition(".")[0]
        others = tuple(sorted(owners - {holder}))
        entries = others if others and candidate.row == holder else (candidate.row,)
        base = replace(base, entries=entries)
        added = tuple(
            name
            for name, _ in block.module.named_parameters()
            if name not in layouts.sliced and name.rpartition(".")[0] == holder
        )
        pairs = [base, replace(base, scaled=added)] if added else [base]
    for rules in ((), inputs) if inputs else ((),):
        for rewrites in rewrite_sets(options):
            for pair in pairs:
                yield Proposal(layouts.linears, replace(pair, rewrites=rewrites, inputs=rules))


def _row_layouts(block: Block, candidate: Candidate, tp_size: int) -> Iterator[tuple[int, tuple[int, ...], Layouts]]:
    row = block.linears[candidate.row]
    width = row.in_features
    for unit in _units(block, candidate, width, tp_size):
        parts = tuple(split_units(width, tp_size, unit))
        found = [layouts for layouts in _levels(block, candidate, parts, tp_size) if layouts.sharded]
        spec = ShardSpec(row.in_dim, (split_section([*parts]) or Section(width, True, unit),))
        for layouts in sorted(found, key=lambda layouts: -layouts.sharded):
            layouts.linears[candidate.row] = LinearPlan("row", row.transposed, spec, None)
            yield width, parts, layouts


def _units(block: Block, candidate: Candidate, width: int, tp_size: int) -> list[int]:
    """Sizes that may have to stay together in the row's input: those that give different cuts, even ones first."""
    sites = _sites(block, candidate, set(), set()).values()
    configs = [config for module in sites if (config := vars(module).get("config")) is not None]
    cuts: dict[tuple[int, ...], int] = {}
    for unit in unit_sizes(width, tp_size, numbers_of([*sites, *configs])):
        parts = tuple(split_units(width, tp_size, unit))
        if min(parts) > 0:
            cuts.setdefault(parts, unit)
    return list(cuts.values())


def _levels(block: Block, candidate: Candidate, parts: tuple[int, ...], tp_size: int) -> Iterator[Layouts]:
    """Layouts with the block as it is, and with mixing modules and inner sums over ranks."""
    starts = [sum(parts[:rank]) for rank in range(tp_size)]
    ranges: list[Ranges] = [((start, size),) for start, size in zip(starts, parts, strict=True)]
    plain = measure_row(block, candidate.row, ranges)
    layouts = _layouts(block, candidate, plain, frozenset(), frozenset())
    if layouts is not None:
        yield layouts
    inner = frozenset(name for name, feeds in zip(candidate.columns, candidate.feeds, strict=True) if feeds)
    mixing = mixing_modules(block)
    if layouts is not None and not any(plan.role == "latent" for plan in layouts.linears.values()):
        return
    found = measure_row(block, candidate.row, ranges, mixing, inner)
    reduced = frozenset(name for name in inner if name in found.channels and _all_split(found.channels[name]))
    if inner:
        found = measure_row(block, candidate.row, ranges, mixing, reduced)
    layouts = _layouts(block, candidate, found, mixing, reduced)
    if layouts is not None and (layouts.norms or reduced):
        yield layouts


def _all_split(used: Tensor) -> bool:
    sections = sections_of(used)
    return sections is not None and all(section.sharded for section in sections)


def _layouts(
    block: Block,
    candidate: Candidate,
    found: Influence,
    mixing: frozenset[str],
    reduced: frozenset[str],
) -> Layouts | None:
    linears: dict[str, LinearPlan] = {}
    feeds_of = dict(zip(candidate.columns, candidate.feeds, strict=True))
    for name in candidate.columns:
        plan = _linear_plan(block, name, found, reduced, bool(feeds_of[name]))
        if plan is None:
            return None
        linears[name] = plan
    for name, feeds in feeds_of.items():
        if not all(linears[feed].role == ("column" if name in reduced else linears[feed].role) for feed in feeds):
            return None
        whole = ("latent", "reduce")
        if name not in reduced and not all(linears[feed].role in whole for feed in feeds):
            return None
    norms = {}
    for name in mixing & found.channels.keys():
        sections = sections_of(found.channels[name])
        if sections is None:
            return None
        if any(section.sharded for section in sections):
            if len(sections) > 1:
                return None
            norms[name] = ShardSpec(0, sections)
    members = {*candidate.columns, candidate.row}
    sliced = _sliced(block, found, members | set(norms))
    sharded = sum(
        plan.weight.sharded_share * block.linears[name].in_features * block.linears[name].out_features
        for name, plan in linears.items()
        if plan.role != "latent"
    )
    return Layouts(linears, sliced, norms, sharded)


def _linear_plan(
    block: Block, name: str, found: Influence, reduced: frozenset[str], is_inner: bool
) -> LinearPlan | None:
    info = block.linears[name]
    if name in reduced:
        sections = sections_of(found.channels[name])
        if sections is None:
            return None
        rows = found.tensors.get(f"{name}.weight")
        rows_used = None if rows is None else rows[info.out_dim]
        taken = ranges_used(rows_used) if rows_used is not None and not bool(rows_used.all()) else ()
        return LinearPlan("reduce", info.transposed, ShardSpec(info.in_dim, sections), None, True, taken)
    used = found.tensors.get(f"{name}.weight")
    if used is None:
        return None
    sections = sections_of(used[info.out_dim])
    take: tuple[Ranges, ...] = ()
    if sections is None:
        sections, take = (Section(info.out_features, False),), ranges_used(used[info.out_dim])
    elif not any(section.sharded for section in sections) and not is_inner:
        return LinearPlan("latent", info.transposed, ShardSpec(info.out_dim, sections), None)
    bias = ShardSpec(0, sections) if info.has_bias else None
    return LinearPlan("column", info.transposed, ShardSpec(info.out_dim, sections), bias, not is_inner, take)


def _sliced(block: Block, found: Influence, skipped: set[str]) -> dict[str, ShardSpec]:
    """Layouts of the tensors of other modules of which each rank needs its own part."""
    sliced = {}
    for name, dims in found.tensors.items():
        if name.rpartition(".")[0] in skipped or name.rpartition(".")[0] in block.linears:
            continue
        best: ShardSpec | None = None
        for dim, used in enumerate(dims):
            sections = sections_of(used)
            spec = ShardSpec(dim, sections) if sections is not None else None
            if spec is not None and spec.sharded_share > (best.sharded_share if best is not None else 0.0):
                best = spec
        if best is not None:
            sliced[name] = best
    return sliced


def _expert_layouts(
    block: Block, candidate: Candidate, tp_size: int
) -> Iterator[tuple[int, tuple[int, ...], Layouts]]:
    parameter = block.module.get_parameter(candidate.parameter)
    for dim, count in _expert_cuts(block, parameter, tp_size):
        size = parameter.shape[dim] // count
        spec = ShardSpec(dim, (Section(size, True),) * count)
        masks = [_mask(parameter, spec, tp_size, rank) for rank in range(tp_size)]
        try:
            found = measure_parameter(block, candidate.row, candidate.parameter, masks)
        except RuntimeError:  # the output does not depend on the parameter through anything differentiable
            continue
        sliced = _sliced(block, found, set())
        if sliced:
            sliced[candidate.parameter] = spec
            yield size, tuple(split_units(size, tp_size, 1)), Layouts({}, sliced, {}, 1.0)


def _mask(parameter: Tensor, spec: ShardSpec, tp_size: int, rank: int) -> Tensor:
    mask = torch.zeros_like(parameter, requires_grad=False)
    return mask.index_fill_(spec.dim, spec.index(tp_size, rank), 1.0)


def _expert_cuts(block: Block, parameter: Tensor, tp_size: int) -> Iterator[tuple[int, int]]:
    """(dim, number of sections): whole dims of stacked matrices; parts of the first dim of matrices below each other."""
    if parameter.ndim >= 3:
        yield from ((dim, 1) for dim in range(1, parameter.ndim) if parameter.shape[dim] >= tp_size)
        return
    counts = {v for module in block.module.modules() for v in vars(module).values() if type(v) is int and v > 1}
    for count in sorted(counts):
        if parameter.shape[0] % count == 0 and parameter.shape[0] // count >= tp_size:
            yield 0, count


def _sizes(layouts: Layouts, width: tuple[int, tuple[int, ...]], tp_size: int) -> Sizes:
    exact: dict[int, tuple[int, ...]] = {width[0]: width[1]}
    columns = []
    specs = [plan.weight for plan in layouts.linears.values()] + list(layouts.sliced.values())
    for spec in specs:
        exact.setdefault(spec.full_size, tuple(spec.local_size(tp_size, rank) for rank in range(tp_size)))
        for section in spec.sections:
            if section.sharded:
                exact.setdefault(section.size, tuple(section.split(tp_size)))
    for plan in layouts.linears.values():
        if plan.role not in ("column", "latent"):
            continue
        full = plan.weight.full_size
        local = tuple(plan.weight.local_size(tp_size, rank) for rank in range(tp_size))
        if plan.take:
            local = tuple(sum(length for _, length in ranges) for ranges in plan.take)
        columns.append((full, local))
        columns += [
            (section.size, tuple(section.split(tp_size)) if section.sharded else (section.size,) * tp_size)
            for section in plan.weight.sections
        ]
    exact = {full: parts for full, parts in exact.items() if set(parts) != {full}}
    return Sizes(width, tuple(sorted(set(columns))), exact)


def _sites(block: Block, candidate: Candidate, owners: set[str], skipped: set[str]) -> dict[str, nn.Module]:
    """The root, the modules between it and the linears, and those whose tensors are split: they see local widths."""
    paths = {""}
    for name in (*candidate.columns, candidate.row):
        parts = name.split(".")[:-1] if not candidate.parameter else name.split(".")
        paths |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    for owner in owners:
        parts = owner.split(".")
        paths |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return {path: block.module.get_submodule(path) for path in sorted(paths - skipped - set(block.linears))}


def _head_count(sites: dict[str, nn.Module]) -> int:
    """Number of attention heads the block believes in; 0 if it does not say."""
    for module in sites.values():
        config = vars(module).get("config")
        # vars, not getattr: configs compute attributes, and some raise for those that vary between layers
        named = {**({} if config is None else vars(config)), **vars(module)}
        for name in HEAD_COUNT_NAMES:
            if type(named.get(name)) is int:
                return int(named[name])
    return 0


def _per_head_inputs(arguments: Arguments, heads: int, tp_size: int) -> tuple[InputRule, ...]:
    """Inputs with a heads dim: the third from the end, or dim 0 that folds batch and heads."""
    if heads < tp_size:
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
