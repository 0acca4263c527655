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
from hf_parallel.tensor_parallel.verify import Arguments, BlockVerifier, RejectedError, Verdict


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
        return _finish(_Draft(model, 1, {}, Trace({}, frozenset(), frozenset()), {}))
    with undisturbed(model):
        linears = find_linears(model)
        trace = trace_linears(model, linears, sample)
        draft = _Draft(model, tp_size, linears, trace, _tied_modules(model))
        draft.reasons = _unusable(draft)
        candidates = _candidates(draft)
        roots = {_kind(draft, candidate): candidate.root for candidate in reversed(candidates)}
        arguments = capture_inputs(model, sorted(set(roots.values())), sample)
        verdicts: dict[Any, tuple[Proposal, Verdict] | str] = {}
        for candidate in candidates:
            kind = _kind(draft, candidate)
            if kind not in verdicts:
                verdicts[kind] = _judge(draft, candidate, arguments.get(candidate.root))
            _settle(draft, candidate, verdicts[kind])
    for name in linears:
        _fall_back(draft, name)
    return _finish(draft)


def _tied_modules(model: nn.Module) -> dict[str, str]:
    """Module -> a different module that owns one of the same parameters."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    shared = [names for names in owners.values() if len(set(names)) > 1]
    return {name: next(other for other in names if other != name) for names in shared for name in names}


def _unusable(draft: _Draft) -> dict[str, str]:
    """Linears that must stay replicated, and why."""
    reasons = {}
    for name, info in draft.linears.items():
        own = {f"{name}.weight", f"{name}.bias"} if name else {"weight", "bias"}
        if name in draft.tied:
            reasons[name] = f"replicated: its parameter is tied to {draft.tied[name]}"
        elif name not in draft.trace.producers:
            reasons[name] = "replicated: not called with a gradient in the sample forward"
        elif own & draft.trace.foreign:
            reasons[name] = "replicated: its parameter is read by code outside the module"
        elif 0 in split_sizes(info.out_features, draft.tp_size):
            reasons[name] = f"replicated: {info.out_features} outputs leave a rank of {draft.tp_size} without any"
    return reasons


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
        exclusive = all(consumers[name] == {row} and name not in draft.trace.escaping for name in columns)
        if not columns or row in columns or len(set(calls)) > 1 or not exclusive:
            continue
        if any(name in draft.reasons for name in members):
            continue
        root = _common_parent(members)
        if root:
            names = [name.removeprefix(f"{root}.") for name in members]
            found.append(Candidate(root, tuple(names[:-1]), names[-1]))
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
    return type(root), candidate.columns, candidate.row, shapes, settings


def _judge(draft: _Draft, candidate: Candidate, arguments: Arguments | None) -> tuple[Proposal, Verdict] | str:
    """The first proposal that verifies, or why none does."""
    if arguments is None:
        return f"{candidate.root} is not called as a module"
    root = draft.model.get_submodule(candidate.root)
    prefix = f"{candidate.root}."
    local = {name.removeprefix(prefix): info for name, info in draft.linears.items() if name.startswith(prefix)}
    failures: dict[str, None] = {}
    try:
        verifier = BlockVerifier(root, candidate, local, arguments, draft.tp_size)
    except Exception as error:  # noqa: BLE001  unknown code may refuse to be copied or run alone; reported
        return f"the block cannot be run alone: {type(error).__name__}: {str(error).strip()[:100]}"
    for proposal in proposals(root, candidate, local, arguments, draft.tp_size):
        try:
            verdict = verifier.verify(proposal)
            _check_reads(draft, candidate, proposal, verdict)
            return proposal, verdict
        except RejectedError as rejection:
            failures[str(rejection)] = None
    return "; ".join(list(failures)[:3]) or "too narrow to split"


def _check_reads(draft: _Draft, candidate: Candidate, proposal: Proposal, verdict: Verdict) -> None:
    """Per-head and partial parameters must belong to the block alone: both are handled where their module runs."""
    for name in (*verdict.partial, *(name for name, _ in proposal.sliced)):
        owner = f"{candidate.root}.{name}".rpartition(".")[0]
        if f"{candidate.root}.{name}" in draft.trace.foreign:
            raise RejectedError(f"{name} is read by code outside its module")
        if owner in draft.linears:
            raise RejectedError(f"{name} belongs to another linear")
    for name, _ in proposal.sliced:
        owner = f"{candidate.root}.{name}".rpartition(".")[0]
        if owner in draft.tied:
            raise RejectedError(f"{name} is per head and shares its module with a tied parameter")


def _settle(draft: _Draft, candidate: Candidate, verdict: tuple[Proposal, Verdict] | str) -> None:
    """Enter an accepted pair into the draft, unless it collides with one that is already there."""
    root = candidate.root
    names = [f"{root}.{name}" for name in (*candidate.columns, candidate.row)]
    collision = None if isinstance(verdict, str) else _collision(draft, root, names, verdict[0])
    if isinstance(verdict, str) or collision:
        reason = f"pair into {names[-1]} rejected: {collision or verdict}"
        draft.reasons.update({name: f"gathered: {reason}" for name in names if name not in draft.plans})
        return
    proposal, needs = verdict
    rewrites = tuple(
        replace(rewrite, module=f"{root}.{rewrite.module}" if rewrite.module else root)
        for rewrite in proposal.rewrites
    )
    for name, spec in proposal.layouts:
        info = draft.linears[f"{root}.{name}"]
        bias = replace(spec, dim=0) if info.has_bias else None
        draft.plans[f"{root}.{name}"] = LinearPlan("column", info.transposed, spec, bias)
    draft.plans[names[-1]] = LinearPlan("row", draft.linears[names[-1]].transposed, proposal.row, None)
    draft.pairs.append(
        PairPlan(
            root=root,
            columns=tuple(names[:-1]),
            row=names[-1],
            rewrites=rewrites,
            partial=tuple(f"{root}.{name}" for name in needs.partial),
            sliced={f"{root}.{name}": spec for name, spec in proposal.sliced},
            inputs=needs.inputs,
        )
    )
    for name in names:
        draft.reasons.pop(name, None)


def _collision(draft: _Draft, root: str, names: list[str], proposal: Proposal) -> str | None:
    """Pairs are verified one at a time, so they may not share linears, per-head tensors or rewritten attributes."""
    for name in names:
        if name in draft.plans:
            return f"{name} already belongs to another pair"
    sliced = {name for pair in draft.pairs for name in pair.sliced}
    for name, _ in proposal.sliced:
        if f"{root}.{name}" in sliced:
            return f"{root}.{name} is already sliced for another pair"
    rewritten = {(rewrite.module, rewrite.attribute) for pair in draft.pairs for rewrite in pair.rewrites}
    for rewrite in proposal.rewrites:
        module = f"{root}.{rewrite.module}" if rewrite.module else root
        if (module, rewrite.attribute) in rewritten:
            return f"{module}.{rewrite.attribute} is already rewritten for another pair"
    return None


def _fall_back(draft: _Draft, name: str) -> None:
    if name in draft.plans or draft.reasons.get(name, "").startswith("replicated"):
        return
    info = draft.linears[name]
    bias = ShardSpec.contiguous(0, info.out_features) if info.has_bias else None
    weight = ShardSpec.contiguous(info.out_dim, info.out_features)
    draft.plans[name] = LinearPlan("gather", info.transposed, weight, bias)
    draft.reasons.setdefault(name, "gathered: no row linear follows that this linear, with others, feeds alone")


def _finish(draft: _Draft) -> TPPlan:
    for name, module in draft.model.named_modules():
        widest = max((p.ndim for p in module._parameters.values() if p is not None), default=0)
        if widest >= 2 and name not in draft.linears:
            kind = "not a linear module" if widest == 2 else f"parameters of {widest} dims (experts, convolutions)"
            draft.reasons.setdefault(name, f"replicated: {kind}")
    plan = TPPlan(
        tp_size=draft.tp_size,
        linears=draft.plans,
        pairs=tuple(draft.pairs),
        fallbacks=draft.reasons if draft.tp_size > 1 else {},
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
