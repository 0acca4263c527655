"""Derive a tensor-parallel plan for any model: trace it, propose column -> row pairs, keep those that verify.

No architecture is known here. What cannot be paired falls back to a column linear with gathered output, which is
right for every linear because nothing outside of it changes; what cannot even be gathered stays replicated. Every
module that is not in a pair is reported with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hf_parallel.compat.private_peft import without_adapters
from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.errors import PlanError
from hf_parallel.model.stack import kind_of
from hf_parallel.settings.sections import ExpertSharing, Treatment
from hf_parallel.tensor_parallel.layout import ShardSpec, split_sizes
from hf_parallel.tensor_parallel.plan.adapters import (
    adapter_plans,
    parts_of_adapters,
    with_adapters,
)
from hf_parallel.tensor_parallel.plan.candidates import Draft, expert_candidates, matrix_owners, pair_candidates
from hf_parallel.tensor_parallel.plan.influence import Arguments, Block
from hf_parallel.tensor_parallel.plan.overrides import OVERRIDDEN, hinted_rows, resolve_overrides
from hf_parallel.tensor_parallel.plan.propose import Candidate, Proposal, proposals
from hf_parallel.tensor_parallel.plan.ties import aliases_of, drop_unequal_ties, tied_modules
from hf_parallel.tensor_parallel.plan.trace import (
    Trace,
    capture_inputs,
    find_linears,
    trace_linears,
    undisturbed,
)
from hf_parallel.tensor_parallel.plan.verify_layer import BlockVerifier, RejectedError
from hf_parallel.tensor_parallel.plan.vocab_plan import find_ends
from hf_parallel.tensor_parallel.plan.whole_experts import routed_candidates, routed_proposals, why_none
from hf_parallel.tensor_parallel.shard_plan import LinearPlan, PairPlan, TPPlan, in_order


NARROW = 8  # a gather of a linear with so many times fewer outputs than inputs (a router) costs more than it saves


def plan_tensor_parallel(
    model: nn.Module,
    tp_size: int,
    sample: Mapping[str, Any],
    overrides: Mapping[str, Treatment] | None = None,
    experts: ExpertSharing = "split",
) -> TPPlan:
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
        overrides: Pattern of module names -> "pair", "gather" or "replicate"; comes before anything derived. Whether
            the embedding and the head are as overridden is checked by `shard_vocabulary`.
        experts: "split" (a part of every expert on each rank) or "whole" (some whole experts, where that verifies).

    Returns:
        The plan; with `tp_size=1` it shards nothing.

    Raises:
        PlanError: If `tp_size` is below 1 or above the model's width, if the model has no values (meta device) or
            quantised ones, if an override names nothing or asks for a pair that does not verify, if experts shall be
            whole and none can be.
    """
    return plan_and_foreign(model, tp_size, sample, overrides, experts)[0]


def plan_and_foreign(
    model: nn.Module,
    tp_size: int,
    sample: Mapping[str, Any],
    overrides: Mapping[str, Treatment] | None,
    experts: ExpertSharing,
) -> tuple[TPPlan, frozenset[str]]:
    """Make the plan of `plan_tensor_parallel`, and list parameters that are read while their owner is not running."""
    if tp_size < 1:
        raise PlanError(f"tp_size={tp_size} is below 1: a model needs at least one rank. Set tp_size to 1 or more.")
    if tp_size == 1:
        return _finish(Draft(model, 1, {}, Trace({}, frozenset(), frozenset(), frozenset(), {}), {})), frozenset()
    with undisturbed(model):
        added = parts_of_adapters(model)
        linears = {name: info for name, info in find_linears(model).items() if name not in added}
        _refuse_quantised(model)
        with without_adapters(model):
            trace = trace_linears(model, linears, sample)
        linears = {name: info for name, info in linears.items() if not _is_only_read(name, trace)}
        draft = Draft(model, tp_size, linears, trace, tied_modules(model))
        _refuse_widths(draft)
        ends = find_ends(model).names
        overridden = resolve_overrides(overrides or {}, [*linears, *matrix_owners(draft), *ends])
        draft.reasons = _unusable(draft) | {
            name: f"whole: {OVERRIDDEN}" if treatment == "replicate" else f"gathered: {OVERRIDDEN}"
            for name, treatment in overridden.items()
            if treatment != "pair" and (name in linears or name not in ends)
        }
        draft.hinted = hinted_rows(model, linears)
        _pair_all(draft, sample, experts)
    drop_unequal_ties(draft)
    for name in linears:
        _fall_back(draft, name)
    drop_unequal_ties(draft)
    _require_pairs(draft, {name: treatment for name, treatment in overridden.items() if name not in ends})
    return _finish(draft), trace.foreign


def _pair_all(draft: Draft, sample: Mapping[str, Any], experts: ExpertSharing) -> None:
    """Pairs of linears, then of experts."""
    _pair_up(draft, pair_candidates(draft), sample)
    if experts == "whole":
        _share_out_experts(draft, sample)
    _pair_up(draft, expert_candidates(draft), sample)
    for name, reason in draft.unrouted.items():
        other = f"{draft.reasons[name]}; " if name in draft.reasons else ""
        draft.reasons[name] = f"{other}not whole experts: {reason}"


def _refuse_quantised(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not parameter.is_floating_point():
            raise PlanError(
                f"parameter {name} holds {parameter.dtype} values of shape {tuple(parameter.shape)}: quantised weights "
                "cannot be sharded. Load the model without quantization_config, or set tp_size to 1."
            )


def _refuse_widths(draft: Draft) -> None:
    widths = [info.in_features for info in draft.linears.values()]
    if not widths:
        return
    hidden = max(sorted(set(widths)), key=widths.count)
    if draft.tp_size > hidden:
        raise PlanError(
            f"tp_size={draft.tp_size} is larger than {hidden}, the width of most linear layers: ranks would hold "
            f"nothing. Set tp_size to a divisor of {hidden}."
        )


def _require_pairs(draft: Draft, overridden: Mapping[str, Treatment]) -> None:
    for name, treatment in overridden.items():
        paired = name in draft.plans and draft.plans[name].role != "gather"
        if (
            treatment == "pair"
            and not paired
            and not any(n.startswith(f"{name}.") for p in draft.pairs for n in p.sliced)
        ):
            raise PlanError(
                f"tensor_parallel.plan wants {name} in a pair with tp_size={draft.tp_size}, but it is "
                f"{draft.reasons.get(name, 'not shardable')}. Remove its pattern, or choose another tp_size."
            )


def _is_only_read(name: str, trace: Trace) -> bool:
    """Whether other code uses the weight of a linear that is itself not called: it is no linear then."""
    return name not in trace.producers and f"{name}.weight" in trace.foreign


def _unusable(draft: Draft) -> dict[str, str]:
    """Linears that must stay replicated, and why."""
    reasons = {}
    reached = frozenset().union(
        draft.trace.escaping, *(call for calls in draft.trace.producers.values() for call in calls)
    )
    for name in draft.linears:
        own = {f"{name}.weight", f"{name}.bias"} if name else {"weight", "bias"}
        if name in draft.tied and draft.tied[name] not in draft.linears:
            reasons[name] = f"replicated: its parameter is tied to {draft.tied[name]}"
        elif name in draft.trace.called and name not in reached:
            reasons[name] = "whole: no gradient reaches it"
        elif own & draft.trace.foreign:
            reasons[name] = "replicated: its parameter is read by code outside the module"
    return reasons


def _pair_up(draft: Draft, candidates: list[Candidate], sample: Mapping[str, Any]) -> None:
    roots = {_kind(draft, candidate): candidate.root for candidate in reversed(candidates)}
    arguments = capture_inputs(draft.model, sorted(set(roots.values())), sample)
    verdicts: dict[Any, Proposal | str] = {}
    for candidate in sorted(candidates, key=lambda c: (f"{c.root}.{c.row}" not in draft.hinted, -len(c.columns))):
        if candidate.parameter and _is_sliced(draft, f"{candidate.root}.{candidate.parameter}"):
            continue
        kind = _kind(draft, candidate)
        if kind not in verdicts:
            verdicts[kind] = _judge(draft, candidate, arguments.get(candidate.root))
        _settle(draft, candidate, verdicts[kind])


def _share_out_experts(draft: Draft, sample: Mapping[str, Any]) -> None:
    """Pairs whose experts are whole; what cannot have them is left to the other proposals.

    Raises:
        PlanError: There is none.
    """
    _pair_up(draft, routed_candidates(draft, sample), sample)
    if not any(pair.routing is not None for pair in draft.pairs):
        raise PlanError(
            f"tensor_parallel.experts: whole with tp_size={draft.tp_size}, but no experts can be placed whole on ranks: "
            f"{why_none(draft)}. Set tensor_parallel.experts to split."
        )


def _is_sliced(draft: Draft, name: str) -> bool:
    return any(name in pair.sliced for pair in draft.pairs)


def _kind(draft: Draft, candidate: Candidate) -> tuple[Any, ...]:
    """Blocks of one kind share a verdict: equal class, names, shapes and settings of their modules."""
    return kind_of(draft.model.get_submodule(candidate.root)), replace(candidate, root="")


def _judge(draft: Draft, candidate: Candidate, arguments: Arguments | None) -> Proposal | str:
    """The first proposal that verifies, or why none does."""
    if arguments is None:
        return "its block is not called as a module"
    root = draft.model.get_submodule(candidate.root)
    prefix = f"{candidate.root}."
    local = {name.removeprefix(prefix): info for name, info in draft.linears.items() if name.startswith(prefix)}
    failures: dict[str, None] = {}
    try:
        verifier = BlockVerifier(Block.copied(root, local, arguments), candidate, draft.tp_size)
        with without_adapters(root):
            block = Block.copied(root, local, arguments)
        for proposal in (routed_proposals if candidate.routed else proposals)(block, candidate, draft.tp_size):
            try:
                verified = verifier.verify(with_adapters(root, proposal))
                _check_reads(draft, candidate, verified)
                return verified
            except RejectedError as rejection:
                failures[str(rejection)] = None
    except Exception as error:  # noqa: BLE001  unknown code may refuse to be copied or run alone; reported
        return f"the block cannot be run alone: {type(error).__name__}: {str(error).strip()[:100]}"
    return "; ".join(list(failures)[:3]) or "no cut of the row's input splits what feeds it"


def _check_reads(draft: Draft, candidate: Candidate, proposal: Proposal) -> None:
    """Partial parameters must belong to the block alone: they are handled where their module runs."""
    for name in (*proposal.pair.partial, *proposal.pair.scaled):
        owner = f"{candidate.root}.{name}".rpartition(".")[0]
        if owner in draft.linears:
            raise RejectedError(f"{name} belongs to another linear")
    for name in proposal.pair.sliced:
        owner = f"{candidate.root}.{name}".rpartition(".")[0]
        if owner in draft.tied:
            raise RejectedError(f"{name} is per head and shares its module with a tied parameter")


def _settle(draft: Draft, candidate: Candidate, verdict: Proposal | str) -> None:
    """Enter an accepted pair into the draft, unless it collides with one that is already there."""
    root = candidate.root
    members = (*candidate.columns, candidate.row)
    names = [f"{root}.{name}" if name else root for name in members]
    collision = None if isinstance(verdict, str) else _collision(draft, root, verdict)
    if isinstance(verdict, str) or collision:
        owner = f"{root}.{candidate.parameter}".rpartition(".")[0]
        if candidate.routed:
            draft.unrouted[owner] = f"{collision or verdict}"
            return
        if candidate.parameter:
            draft.reasons.setdefault(owner, f"replicated: no parameter acts as a row: {collision or verdict}")
            return
        reason = f"pair into {names[-1]} rejected: {collision or verdict}"
        draft.reasons.update({name: f"gathered: {reason}" for name in names if name not in draft.plans})
        return
    pair = _absolute(root, verdict.pair)
    draft.plans |= {
        f"{root}.{name}": plan for name, plan in verdict.linears.items() if f"{root}.{name}" in draft.linears
    }
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


def _collision(draft: Draft, root: str, proposal: Proposal) -> str | None:
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


def _fall_back(draft: Draft, name: str) -> None:
    if name in draft.plans or draft.reasons.get(name, "").startswith(("replicated", "whole")):
        return
    info = draft.linears[name]
    consumers = [row for row, calls in draft.trace.producers.items() if any(name in call for call in calls)]
    into_pairs = [row in draft.plans and draft.plans[row].role == "column" for row in consumers]
    if consumers and all(into_pairs) and info.out_features < info.in_features:
        draft.reasons[name] = "whole: a narrow projection that only feeds columns"
        return
    if 0 in split_sizes(info.out_features, draft.tp_size):
        draft.reasons[name] = f"whole: {info.out_features} outputs leave a rank of {draft.tp_size} without any"
        return
    if info.in_features >= NARROW * info.out_features:
        draft.reasons[name] = "whole: few outputs of many inputs"
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


def _finish(draft: Draft) -> TPPlan:
    split = {name.rpartition(".")[0] for pair in draft.pairs for name in pair.sliced} | parts_of_adapters(draft.model)
    for name, module in draft.model.named_modules():
        widest = max((p.ndim for p in own_parameters(module).values() if p is not None), default=0)
        if widest >= 2 and name not in draft.linears and name not in split:
            kind = "not a linear module" if widest == 2 else f"parameters of {widest} dims (experts, convolutions)"
            draft.reasons.setdefault(name, f"replicated: {kind}")
    reasons = draft.reasons if draft.tp_size > 1 else {}
    plan = TPPlan(
        tp_size=draft.tp_size,
        linears=draft.plans | adapter_plans(draft.model, draft.plans),
        pairs=in_order(draft.pairs),
        fallbacks={name: reason for name, reason in reasons.items() if not reason.startswith("whole: ")},
        whole={
            name: reason.removeprefix("whole: ") for name, reason in reasons.items() if reason.startswith("whole: ")
        },
        flops=draft.trace.flops,
        numel={name: parameter.numel() for name, parameter in draft.model.named_parameters()},
        aliases={},
    )
    return replace(plan, aliases=aliases_of(draft.model, plan.shard_specs()))
