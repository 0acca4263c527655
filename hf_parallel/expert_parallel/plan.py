"""Find modules of experts that can be spread over replicas: proposed by structure, accepted by numbers.

Proposed are modules that own stacks of matrices, one for each expert, and are called with hidden states, the experts chosen
for each token, and their weights. One of each kind is run as all ranks, threads that really exchange tokens, and compared
with the whole module: outputs and every gradient. No type of model is named anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.errors import PlanError
from hf_parallel.expert_parallel.expert_plan import ExpertKind, ExpertModule, ExpertPlan
from hf_parallel.expert_parallel.verify import refusal
from hf_parallel.tensor_parallel.layout import Section, ShardSpec, split_units
from hf_parallel.tensor_parallel.plan.trace import capture_inputs, undisturbed
from hf_parallel.tensor_parallel.plan.whole_experts import expert_counts, routing_of
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite, Routing


OTHER_WAYS = (
    "Set ep_size to 1; pp_size and zero.stage 3 divide its weights too, and tp_size the width of most experts."
)


def find_kinds(model: nn.Module, ep_size: int, sample: Mapping[str, Any]) -> list[ExpertKind]:
    """Kinds of expert modules that verify; runs the model once, changes nothing.

    Args:
        model: A whole model, or a small one of the same structure.
        ep_size: Ranks that are to share the experts.
        sample: A batch for it.

    Raises:
        PlanError: A module that looks like experts gives other numbers on several ranks. It is named.
    """
    owners = list(stack_owners(model))
    roots = sorted({name for owner in owners for name in (owner, owner.rpartition(".")[0])} - {""})
    found: dict[tuple[str, str], ExpertKind] = {}
    with undisturbed(model):
        arguments = capture_inputs(model, roots, sample)
        for owner in owners:
            for root in (owner, owner.rpartition(".")[0]):
                module = model.get_submodule(root) if root else model
                path = owner.removeprefix(root).removeprefix(".")
                key = (_kind_of(module), path)
                rule = _rule(model, owner, arguments.get(root))
                if rule is None or key in found:
                    continue
                found[key] = _verified(root, module, arguments[root], ExpertKind(*key, rule, True), ep_size)
                break
    return list(found.values())


def _verified(root: str, module: nn.Module, arguments: Any, kind: ExpertKind, ep_size: int) -> ExpertKind:
    """The kind, with or without rewriting what counts the experts.

    Raises:
        PlanError: It does not give the numbers of the whole module.
    """
    parts = min(ep_size, kind.routing.experts)
    why = ""
    for proposal in (kind, replace(kind, rewrites=False)):
        made = _module(root, module, proposal, parts)
        found = "its stacks have several sizes" if made is None else refusal(module, made, parts, arguments)
        if not found:
            return proposal
        why = why or found
    raise PlanError(
        f"ep_size={ep_size}: {root} ({type(module).__name__}) does not compute the same on {parts} ranks as on one: {why}. "
        "Set ep_size to 1, and zero.stage to 1 to share out the optimizer instead."
    )


def plan_experts(model: nn.Module, kinds: list[ExpertKind], ep_size: int) -> ExpertPlan:
    """The experts of a whole model; its values are not looked at.

    Raises:
        PlanError: It has none of these kinds, or a module with fewer experts than ranks.
    """
    known = {(kind.kind, kind.path): kind for kind in kinds}
    modules = []
    for owner in stack_owners(model):
        for root in (owner, owner.rpartition(".")[0]):
            module = model.get_submodule(root) if root else model
            kind = known.get((_kind_of(module), owner.removeprefix(root).removeprefix(".")))
            made = None if kind is None else _module(root, module, kind, ep_size)
            if made is not None:
                modules.append(made)
                break
    few = next((one for one in modules if one.routing.experts < ep_size), None)
    if few is not None:
        raise PlanError(
            f"ep_size={ep_size}: {few.root} has {few.routing.experts} experts, and each rank needs one. Set ep_size to "
            f"{few.routing.experts} or a divisor of it."
        )
    if not modules:
        raise PlanError(f"ep_size={ep_size}: {_why_none(model)}. {OTHER_WAYS}")
    return ExpertPlan(ep_size, tuple(modules))


def refuse_without_experts(model: nn.Module, ep_size: int) -> None:
    """Refuse a model that has no experts to spread, before anything is run.

    Raises:
        PlanError: Says so.
    """
    if ep_size > 1 and next(stack_owners(model), None) is None:
        raise PlanError(f"ep_size={ep_size}: {_why_none(model)}. Set ep_size to 1.")


def stack_owners(model: nn.Module) -> Iterator[str]:
    """Modules, other than those of torch.nn, that own stacks of matrices."""
    for name, module in model.named_modules():
        stacks = [p for p in own_parameters(module).values() if p is not None and p.ndim >= 3 and len(p) > 1]
        if name and stacks and not type(module).__module__.startswith("torch.nn"):
            yield name


def _why_none(model: nn.Module) -> str:
    owner = next(stack_owners(model), None)
    if owner is None:
        return (
            f"{type(model).__name__} has no module that owns stacks of experts (one parameter with a matrix for each)"
        )
    module = model.get_submodule(owner)
    kind = type(module).__name__
    if not expert_counts(module):
        sizes = sorted({len(p) for p in module.parameters() if p.ndim >= 3})
        return f"{owner} ({kind}) owns stacks of {' and '.join(map(str, sizes))} matrices, which are not one for each expert"
    return (
        f"{owner} ({kind}) is not called with hidden states f[N H], experts i[N K] and their weights f[N K], so it does not say which rows "
        "each expert gets (every expert may run all rows, or these are no experts)"
    )


def _kind_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _rule(model: nn.Module, owner: str, arguments: Any) -> Routing | None:
    if arguments is None:
        return None
    counts = expert_counts(model.get_submodule(owner))
    return next((rule for count in counts if (rule := routing_of(arguments, count)) is not None), None)


def _module(root: str, module: nn.Module, kind: ExpertKind, ep_size: int) -> ExpertModule | None:
    """Plan the parts of a module that ranks keep; None if its stacks are not of one matrix for each expert."""
    owner = module.get_submodule(kind.path)
    counts = expert_counts(owner)
    if not counts:
        return None
    experts = counts[0]
    values = tuple(split_units(experts, ep_size, 0))
    prefix = f"{kind.path}." if kind.path else ""
    sliced = {
        f"{prefix}{name}": _spec(experts) for name, p in owner.named_parameters() if p.ndim and len(p) == experts
    }
    rewrites = tuple(
        AttributeRewrite(path, name, values)
        for path, part in (module.named_modules() if kind.rewrites else ())
        for name, value in sorted(vars(part).items())
        if type(value) is int and value == experts and "expert" in name and "per_tok" not in name
    )
    return ExpertModule(root, replace(kind.routing, experts=experts), sliced, rewrites)


def _spec(experts: int) -> ShardSpec:
    return ShardSpec(0, (Section(experts, True, 0),))
