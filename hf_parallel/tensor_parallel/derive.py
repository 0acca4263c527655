"""Derive a tensor-parallel plan for any model: trace it, propose column -> row pairs, keep those that verify.

No architecture is known here. What cannot be paired falls back to a column linear with gathered output, which is
right for every linear because nothing outside of it changes; what cannot even be gathered stays replicated. Every
module that is not in a pair is reported with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.influence import Arguments, Block
from hf_parallel.tensor_parallel.layout import ShardSpec, split_sizes
from hf_parallel.tensor_parallel.plan import LinearPlan, PairPlan, TPPlan
from hf_parallel.tensor_parallel.propose import Candidate, Proposal, proposals
from hf_parallel.tensor_parallel.trace import (
    LinearInfo,
    Trace,
    capture_inputs,
    find_linears,
    trace_linears,
    undisturbed,
)
from hf_parallel.tensor_parallel.verify import BlockVerifier, RejectedError


NARROW = 8  # a gather of a linear with so many times fewer outputs than inputs (a router) costs more than it saves


@dataclass
class _Draft:
    """The plan while it is made."""

    model: nn.Module
    tp_size: int
    linears: dict[str, LinearInfo]
    trace: Trace
    tied: dict[str, str]
    reasons: dict[str, str] = field(default_factory=dict)
    plans: dict[str, LinearPlan] = field(default_factory=dict)
    pairs: list[PairPlan] = field(default_factory=list)


def plan_tensor_parallel(model: nn.Module, tp_size: int, sample: Mapping[str, Any]) -> TPPlan:
    """Plan how `tp_size` ranks share the linear modules of `model`.

    Pure: the model, its buffers, training flags, gradients and the random state are as before. Deterministic: every
    rank that plans the same model gets the same plan. Pairs are verified on copies of one block of each kind, in fp32
    where the model is in half precision, so a bf16 model keeps its pairs. The whole model runs forward twice on
    `sample`.

    Args:
        model: The full model with materialised weights, eager enough to run `model(**sample)`.
        tp_size: Number of tensor-parallel ranks, >= 1.
        sample: Keyword arguments of a forward pass, for instance `input_ids` and `attention_mask` of a tiny batch. A
            few rows of a few tokens are enough; sizes that differ from the model's head counts avoid coincidences.

    Returns:
        The plan; with `tp_size=1` it shards nothing.

    Raises:
        PlanError: If `tp_size` is below 1 or the model has no values (meta device).
    """
    if tp_size < 1:
        raise PlanError(f"tp_size={tp_size} is below 1: a model needs at least one rank. Set tp_size to 1 or more.")
    if tp_size == 1:
        return _finish(_Draft(model, 1, {}, Trace({}, frozenset(), frozenset(), frozenset()), {}))
    with undisturbed(model):
        linears = find_linears(model)
        trace = trace_linears(model, linears, sample)
        linears = {name: info for name, info in linears.items() if not _is_only_read(name, trace)}
        draft = _Draft(model, tp_size, linears, trace, _tied_modules(model))
        draft.reasons = _unusable(draft)
        for candidates in (_candidates(draft), expert_candidates(draft)):
            _pair_up(draft, candidates, sample)
    _drop_unequal_ties(draft)
    for name in linears:
        _fall_back(draft, name)
    _drop_unequal_ties(draft)
    return _finish(draft)


def _is_only_read(name: str, trace: Trace) -> bool:
    """Whether other code uses the weight of a linear that is itself not called: it is no linear then."""
    return name not in trace.producers and f"{name}.weight" in trace.foreign


def _tied_modules(model: nn.Module) -> dict[str, str]:
    """Module -> a different module that owns one of the same parameters."""
    shared = [names for names in _owners(model).values() if len(set(names)) > 1]
    return {name: next(other for other in names if other != name) for names in shared for name in names}


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Id of a parameter -> names of the modules that own it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def _drop_unequal_ties(draft: _Draft) -> None:
    """Give up pairs whose linears share a parameter with a module that does not store it in the same way."""
    while True:
        unequal = set()
        for names in _owners(draft.model).values():
            if len(set(names)) > 1 and len({repr(draft.plans.get(name)) for name in names}) > 1:
                unequal |= {name for name in names if name in draft.plans}
        if not unequal:
            return
        for pair in [pair for pair in draft.pairs if unequal & {*pair.columns, pair.row}]:
            draft.pairs.remove(pair)
            unequal |= {*pair.columns, pair.row}
        for name in unequal & set(draft.plans):
            del draft.plans[name]
            if name in draft.tied:
                draft.reasons[name] = (
                    f"replicated: its parameter is tied to {draft.tied[name]}, which is used otherwise"
                )


def _unusable(draft: _Draft) -> dict[str, str]:
    """Linears that must stay replicated, and why."""
    reasons = {}
    reached = frozenset().union(
        draft.trace.escaping, *(call for calls in draft.trace.producers.values() for call in calls)
    )
    for name, info in draft.linears.items():
        own = {f"{name}.weight", f"{name}.bias"} if name else {"weight", "bias"}
        if name in draft.tied and draft.tied[name] not in draft.linears:
            reasons[name] = f"replicated: its parameter is tied to {draft.tied[name]}"
        elif name in draft.trace.called and name not in reached:
            reasons[name] = "whole: no gradient reaches it"
        elif own & draft.trace.foreign:
            reasons[name] = "replicated: its parameter is read by code outside the module"
        elif 0 in split_sizes(info.out_features, draft.tp_size):
            reasons[name] = f"replicated: {info.out_features} outputs leave a rank of {draft.tp_size} without any"
    return reasons


def _pair_up(draft: _Draft, candidates: list[Candidate], sample: Mapping[str, Any]) -> None:
    roots = {_kind(draft, candidate): candidate.root for candidate in reversed(candidates)}
    arguments = capture_inputs(draft.model, sorted(set(roots.values())), sample)
    verdicts: dict[Any, Proposal | str] = {}
    for candidate in sorted(candidates, key=lambda candidate: -len(candidate.columns)):
        if candidate.parameter and _is_sliced(draft, f"{candidate.root}.{candidate.parameter}"):
            continue
        kind = _kind(draft, candidate)
        if kind not in verdicts:
            verdicts[kind] = _judge(draft, candidate, arguments.get(candidate.root))
        _settle(draft, candidate, verdicts[kind])


def _is_sliced(draft: _Draft, name: str) -> bool:
    return any(name in pair.sliced for pair in draft.pairs)


def _candidates(draft: _Draft) -> list[Candidate]:
    """Rows whose producers feed nothing else, in call order; names relative to the innermost common module."""
    consumers: dict[str, set[str]] = {}
    for row, calls in draft.trace.producers.items():
        for column in frozenset().union(*calls):
            consumers.setdefault(column, set()).add(row)
    order = {name: position for position, name in enumerate(draft.trace.producers)}
    found = []
    for row, calls in draft.trace.producers.items():
        columns = sorted(calls[0], key=order.__getitem__)
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


def expert_candidates(draft: _Draft) -> list[Candidate]:
    """Modules that own several matrices, or stacks of them, which are not linears: each could act as the row."""
    found = []
    taken = set(draft.plans) | {name.rpartition(".")[0] for pair in draft.pairs for name in pair.sliced}
    for owner, module in draft.model.named_modules():
        matrices = [
            key for key, p in module._parameters.items() if p is not None and p.ndim >= 2 and p.is_floating_point()
        ]
        known = owner in draft.linears or type(module).__module__.startswith("torch.nn") or owner in taken
        if not owner or known or not matrices or any(f"{owner}.{key}" in draft.tied for key in matrices):
            continue
        stack = len(matrices) == 1 and module._parameters[matrices[0]].ndim == 3
        if len(matrices) < 2 and not stack:
            continue
        foreign = any(f"{owner}.{key}" in draft.trace.foreign for key in matrices)
        root = owner.rpartition(".")[0] if foreign or stack else owner
        row = "" if root == owner or foreign else owner.removeprefix(f"{root}.")
        prefix = owner.removeprefix(root).removeprefix(".")
        if root:
            found += [Candidate(root, (), row, (), f"{prefix}.{key}" if prefix else key) for key in reversed(matrices)]
    return found


def _common_parent(names: Iterable[str]) -> str:
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _kind(draft: _Draft, candidate: Candidate) -> tuple[Any, ...]:
    """Blocks of one kind share a verdict: equal class, names, shapes and settings of their modules."""
    root = draft.model.get_submodule(candidate.root)
    shapes = tuple((name, tuple(parameter.shape), parameter.dtype) for name, parameter in root.named_parameters())
    settings = tuple(
        (path, name, value)
        for path, module in root.named_modules()
        for name, value in sorted(vars(module).items())
        if type(value) in (int, bool, str) and not any(word in name for word in ("idx", "index", "layer_id"))
    )
    return type(root), replace(candidate, root=""), shapes, settings


def _judge(draft: _Draft, candidate: Candidate, arguments: Arguments | None) -> Proposal | str:
    """The first proposal that verifies, or why none does."""
    if arguments is None:
        return f"{candidate.root} is not called as a module"
    root = draft.model.get_submodule(candidate.root)
    prefix = f"{candidate.root}."
    local = {name.removeprefix(prefix): info for name, info in draft.linears.items() if name.startswith(prefix)}
    failures: dict[str, None] = {}
    try:
        block = Block.copied(root, local, arguments)
        verifier = BlockVerifier(block, candidate, draft.tp_size)
        for proposal in proposals(block, candidate, draft.tp_size):
            try:
                verified = verifier.verify(proposal)
                _check_reads(draft, candidate, verified)
                return verified
            except RejectedError as rejection:
                failures[str(rejection)] = None
    except Exception as error:  # noqa: BLE001  unknown code may refuse to be copied or run alone; reported
        return f"the block cannot be run alone: {type(error).__name__}: {str(error).strip()[:100]}"
    return "; ".join(list(failures)[:3]) or "no cut of the row's input splits what feeds it"


def _check_reads(draft: _Draft, candidate: Candidate, proposal: Proposal) -> None:
    """Partial parameters must belong to the block alone: they are handled where their module runs."""
    for name in (*proposal.pair.partial, *proposal.pair.scaled):
        owner = f"{candidate.root}.{name}".rpartition(".")[0]
        if owner in draft.linears:
            raise RejectedError(f"{name} belongs to another linear")
    for name in proposal.pair.sliced:
        owner = f"{candidate.root}.{name}".rpartition(".")[0]
        if owner in draft.tied:
            raise RejectedError(f"{name} is per head and shares its module with a tied parameter")


def _settle(draft: _Draft, candidate: Candidate, verdict: Proposal | str) -> None:
    """Enter an accepted pair into the draft, unless it collides with one that is already there."""
    root = candidate.root
    members = (*candidate.columns, candidate.row)
    names = [f"{root}.{name}" if name else root for name in members]
    collision = None if isinstance(verdict, str) else _collision(draft, root, verdict)
    if isinstance(verdict, str) or collision:
        if candidate.parameter:
            owner = f"{root}.{candidate.parameter}".rpartition(".")[0]
            draft.reasons.setdefault(owner, f"replicated: no parameter acts as a row: {collision or verdict}")
            return
        reason = f"pair into {names[-1]} rejected: {collision or verdict}"
        draft.reasons.update({name: f"gathered: {reason}" for name in names if name not in draft.plans})
        return
    pair = _absolute(root, verdict.pair)
    draft.plans |= {f"{root}.{name}": plan for name, plan in verdict.linears.items()}
    draft.pairs.append(pair)
    for name in (*names, *(name.rpartition(".")[0] for name in pair.sliced)):
        draft.reasons.pop(name, None)
    for name, plan in verdict.linears.items():
        if plan.role == "latent":
            draft.reasons[f"{root}.{name}"] = "whole: every rank uses all of its outputs"


def _absolute(root: str, pair: PairPlan) -> PairPlan:
    """The pair with full names."""

    def full(name: str) -> str:
        return f"{root}.{name}" if name else root

    return replace(
        pair,
        root=root,
        columns=tuple(full(name) for name in pair.columns),
        row=full(pair.row),
        rewrites=tuple(replace(rewrite, module=full(rewrite.module)) for rewrite in pair.rewrites),
        partial=tuple(full(name) for name in pair.partial),
        sliced={full(name): spec for name, spec in pair.sliced.items()},
        norms={full(name): spec for name, spec in pair.norms.items()},
        entries=tuple(full(name) for name in pair.entries),
        scaled=tuple(full(name) for name in pair.scaled),
    )


def _collision(draft: _Draft, root: str, proposal: Proposal) -> str | None:
    """Pairs are verified one at a time, so they may not share linears, per-head tensors or rewritten attributes."""
    pair = _absolute(root, proposal.pair)
    for name in proposal.linears:
        if f"{root}.{name}" in draft.plans:
            return f"{root}.{name} already belongs to another pair"
    sliced = {name for other in draft.pairs for name in other.sliced}
    for name in pair.sliced:
        if name in sliced:
            return f"{name} is already sliced for another pair"
    rewritten = {(rewrite.module, rewrite.attribute) for other in draft.pairs for rewrite in other.rewrites}
    for rewrite in pair.rewrites:
        if (rewrite.module, rewrite.attribute) in rewritten:
            return f"{rewrite.module}.{rewrite.attribute} is already rewritten for another pair"
    return None


def _fall_back(draft: _Draft, name: str) -> None:
    if name in draft.plans or draft.reasons.get(name, "").startswith(("replicated", "whole")):
        return
    info = draft.linears[name]
    consumers = [row for row, calls in draft.trace.producers.items() if any(name in call for call in calls)]
    into_pairs = [row in draft.plans and draft.plans[row].role == "column" for row in consumers]
    if consumers and all(into_pairs) and info.out_features < info.in_features:
        draft.reasons[name] = "whole: a narrow projection that only feeds columns"
        return
    if info.in_features >= NARROW * info.out_features:
        draft.reasons[name] = f"whole: {info.out_features} outputs of {info.in_features} inputs"
        return
    bias = ShardSpec.contiguous(0, info.out_features) if info.has_bias else None
    weight = ShardSpec.contiguous(info.out_dim, info.out_features)
    draft.plans[name] = LinearPlan("gather", info.transposed, weight, bias)
    called = name in draft.trace.producers
    draft.reasons.setdefault(
        name,
        "gathered: not called with a gradient in the sample"
        if not called
        else "gathered: no row linear follows that this linear, with others, feeds alone",
    )


def _finish(draft: _Draft) -> TPPlan:
    for name, module in draft.model.named_modules():
        widest = max((p.ndim for p in module._parameters.values() if p is not None), default=0)
        if widest >= 2 and name not in draft.linears:
            kind = "not a linear module" if widest == 2 else f"parameters of {widest} dims (experts, convolutions)"
            draft.reasons.setdefault(name, f"replicated: {kind}")
    reasons = draft.reasons if draft.tp_size > 1 else {}
    plan = TPPlan(
        tp_size=draft.tp_size,
        linears=draft.plans,
        pairs=tuple(draft.pairs),
        fallbacks={name: reason for name, reason in reasons.items() if not reason.startswith("whole: ")},
        whole={
            name: reason.removeprefix("whole: ") for name, reason in reasons.items() if reason.startswith("whole: ")
        },
        numel={name: parameter.numel() for name, parameter in draft.model.named_parameters()},
        aliases={},
    )
    return replace(plan, aliases=_aliases(draft.model, plan.shard_specs()))


def _aliases(model: nn.Module, stored: Mapping[str, ShardSpec]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), []).append(name)
    groups = [group for group in names.values() if len(group) > 1]
    return {
        name: tuple(other for other in group if other != name) for group in groups for name in group if name in stored
    }
