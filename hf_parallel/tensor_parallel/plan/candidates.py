"""Candidates for column-row pairs: a row and the linears before it, read from the trace and judged elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.tensor_parallel.plan.propose import Candidate
from hf_parallel.tensor_parallel.plan.trace import LinearInfo, Trace
from hf_parallel.tensor_parallel.shard_plan import LinearPlan, PairPlan


@dataclass
class Draft:
    """The plan while it is made; `unrouted` are owners of experts that cannot be distributed whole, and why."""

    model: nn.Module
    tp_size: int
    linears: dict[str, LinearInfo]
    trace: Trace
    tied: dict[str, str]
    reasons: dict[str, str] = field(default_factory=dict)
    hinted: frozenset[str] = frozenset()
    plans: dict[str, LinearPlan] = field(default_factory=dict)
    pairs: list[PairPlan] = field(default_factory=list)
    unrouted: dict[str, str] = field(default_factory=dict)


def pair_candidates(draft: Draft) -> list[Candidate]:
    """Rows whose producers feed nothing else, in call order; names relative to the innermost common module."""
    consumers: dict[str, set[str]] = {}
    for row, calls in draft.trace.producers.items():
        for column in frozenset().union(*calls):
            consumers.setdefault(column, set()).add(row)
    order = {name: position for position, name in enumerate(draft.trace.producers)}
    found = []
    for row, calls in draft.trace.producers.items():
        columns = sorted(_with_inner(calls[0], row, draft.trace.producers, consumers), key=order.__getitem__)
        members = (*columns, row)
        known = set(members)
        exclusive = all(consumers[name] <= known and name not in draft.trace.escaping for name in columns)
        if not columns or row in columns or len(set(calls)) > 1 or not exclusive:
            continue
        if any(name in draft.reasons for name in members):
            continue
        root = _common_parent(members)
        if root:
            feeds = [frozenset().union(*draft.trace.producers[name]) & set(columns) for name in columns]
            found.append(
                Candidate(
                    root,
                    tuple(name.removeprefix(f"{root}.") for name in columns),
                    row.removeprefix(f"{root}."),
                    tuple(frozenset(name.removeprefix(f"{root}.") for name in feed) for feed in feeds),
                )
            )
    return found


def _with_inner(
    direct: frozenset[str], row: str, producers: Mapping[str, list[frozenset[str]]], consumers: Mapping[str, set[str]]
) -> set[str]:
    """`direct` and the linears that lie between them: fed by one of them, feeding nothing but them."""
    members = set(direct)
    while True:
        feeding = {name for member in members for call in producers.get(member, []) for name in call}
        inner = {
            name
            for name in feeding - members - {row}
            if consumers[name] <= members | {row} and members & frozenset().union(*producers.get(name, []))
        }
        if not inner:
            return members
        members |= inner


def expert_candidates(draft: Draft) -> list[Candidate]:
    """Modules that own several matrices, or stacks of them, which are not linears: each could act as the row."""
    found = []
    taken = set(draft.plans) | {name.rpartition(".")[0] for pair in draft.pairs for name in pair.sliced}
    for owner, matrices in expert_owners(draft).items():
        if owner in taken:
            continue
        stack = len(matrices) == 1
        foreign = any(f"{owner}.{key}" in draft.trace.foreign for key in matrices)
        root = owner.rpartition(".")[0] if foreign or stack else owner
        row = "" if root == owner or foreign else owner.removeprefix(f"{root}.")
        prefix = owner.removeprefix(root).removeprefix(".")
        if root:
            found += [Candidate(root, (), row, (), f"{prefix}.{key}" if prefix else key) for key in reversed(matrices)]
    return found


def expert_owners(draft: Draft) -> dict[str, list[str]]:
    """The entries of `matrix_owners` with several matrices, or a stack of them, about which nothing is decided yet."""
    return {
        owner: keys
        for owner, keys in matrix_owners(draft).items()
        if owner not in draft.tied
        and owner not in draft.reasons
        and (len(keys) > 1 or draft.model.get_parameter(f"{owner}.{keys[0]}").ndim == 3)
    }


def matrix_owners(draft: Draft) -> dict[str, list[str]]:
    """Modules other than linears and those of torch.nn that own matrices or stacks of them, and their names."""
    owners = {}
    for owner, module in draft.model.named_modules():
        found = [
            k for k, p in own_parameters(module).items() if p is not None and p.ndim >= 2 and p.is_floating_point()
        ]
        if owner and found and owner not in draft.linears and not type(module).__module__.startswith("torch.nn"):
            owners[owner] = found
    return owners


def _common_parent(names: Iterable[str]) -> str:
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
