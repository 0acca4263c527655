"""Find modules of experts that can be distributed expert by expert, and propose it; `verify` decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_parallel.tensor_parallel.layout import Section, ShardSpec, split_units
from hf_parallel.tensor_parallel.plan.candidates import Draft, expert_owners
from hf_parallel.tensor_parallel.plan.influence import Arguments, Block
from hf_parallel.tensor_parallel.plan.propose import Candidate, Proposal
from hf_parallel.tensor_parallel.plan.trace import capture_inputs
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite, PairPlan, Routing


def routed_candidates(draft: Draft, sample: Mapping[str, Any]) -> list[Candidate]:
    """Modules whose experts could be distributed over ranks; `draft.unrouted` gets those with fewer experts than ranks."""
    owners = expert_owners(draft)
    names = sorted({*owners, *(name.rpartition(".")[0] for name in owners)} - {""})
    arguments = capture_inputs(draft.model, names, sample)
    found = []
    for owner, keys in owners.items():
        for root in (owner, owner.rpartition(".")[0]):
            counts = _expert_counts(draft.model, owner, root) if root in arguments else []
            rule = next((rule for count in counts if (rule := routing_of(arguments[root], count))), None)
            if rule is not None and rule.experts < draft.tp_size:
                draft.unrouted[owner] = f"{root} has {rule.experts} experts for {draft.tp_size} ranks"
            elif rule is not None:
                path = owner.removeprefix(root).removeprefix(".")
                found.append(Candidate(root, (), "", (), f"{path}.{keys[-1]}".removeprefix("."), True))
            if rule is not None:
                break
    return found


def why_none(draft: Draft) -> str:
    """Why no experts are distributed."""
    owner = next(iter(expert_owners(draft)), None)
    if draft.unrouted:
        return next(iter(draft.unrouted.values()))
    if owner is not None:
        return f"{owner} is no stack of experts that is called with hidden states, indices i[N K] and weights f[N K]"
    return "no module owns stacked experts"


def expert_counts(owner: nn.Module) -> list[int]:
    """Numbers of experts that a module with stacks of them may have: one, or none."""
    stacks = [p.shape[0] for p in owner.parameters() if p.ndim >= 3]
    return [stacks[0]] if set(stacks[:1]) == set(stacks) != set() else []


def _expert_counts(model: nn.Module, owner: str, root: str) -> list[int]:
    """Numbers of experts that a module may have: the first dim of stacks, or what it counts by that name."""
    stacks = model.get_submodule(owner)
    if any(p.ndim >= 3 for p in stacks.parameters()):
        return expert_counts(stacks)
    modules = model.get_submodule(root).modules()
    named = {v for module in modules for k, v in vars(module).items() if type(v) is int and "expert" in k and v > 1}
    return sorted(named, reverse=True)


def routing_of(arguments: Arguments, experts: int) -> Routing | None:
    """Find the arguments of a module that are hidden states f[... H], indices i[N K] and weights f[N K] of experts."""
    args, kwargs = arguments
    given: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = {key: value for key, value in given if isinstance(value, Tensor)}
    for index, indices in tensors.items():
        if indices.ndim != 2 or indices.is_floating_point():
            continue
        floats = {key: value for key, value in tensors.items() if value.is_floating_point()}
        weights = [key for key, value in floats.items() if value.shape == indices.shape]
        hidden = [key for key, value in floats.items() if key not in weights and _rows(value) == len(indices)]
        if len(weights) == 1 and len(hidden) == 1:
            return Routing(hidden[0], index, weights[0], experts)
    return None


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // max(1, tensor.shape[-1]) if tensor.ndim else 0


def routed_proposals(block: Block, candidate: Candidate, tp_size: int) -> Iterator[Proposal]:
    """The experts of the root `block` distributed over the ranks, with less and less of what counts them rewritten."""
    owner, _, _ = candidate.parameter.rpartition(".")
    for experts in _expert_counts(block.module, owner, ""):
        rule = routing_of(block.arguments, experts)
        if rule is None:
            continue
        sliced = {
            name: ShardSpec(0, (Section(p.shape[0], True, p.shape[0] // experts if p.shape[0] > experts else 0),))
            for name, p in block.module.named_parameters()
            if p.ndim >= 2 and p.shape[0] % experts == 0
        }
        for rewrites in dict.fromkeys((_rewrites(block, experts, tp_size), ())):
            pair = PairPlan("", (), "", rewrites, sliced=sliced, entries=("",), routing=rule)
            yield Proposal({}, pair)


def _rewrites(block: Block, experts: int, tp_size: int) -> tuple[AttributeRewrite, ...]:
    values = tuple(split_units(experts, tp_size, 0))
    return tuple(
        AttributeRewrite(path, name, values)
        for path, module in block.module.named_modules()
        for name, value in sorted(vars(module).items())
        if type(value) is int and value == experts and "expert" in name and "per_tok" not in name
    )
