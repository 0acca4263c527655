"""Spreading the experts of a whole model over ranks, in place."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_parallel.expert_parallel.exchange import Group, install_dispatch
from hf_parallel.expert_parallel.expert_plan import ExpertModule, ExpertPlan
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.run.apply import set_attribute, shard_parameter
from hf_parallel.tensor_parallel.run.functions import SharedCopy
from hf_parallel.tensor_parallel.run.reads import install_reads, open_in
from hf_parallel.tensor_parallel.run.whole_tensors import Scope


def apply_expert_parallel(
    model: nn.Module, plan: ExpertPlan, group: Group, ep_rank: int, holds: Callable[[str], bool]
) -> None:
    """Keep this rank's experts of the modules that this rank holds; `Parameter` objects stay the same.

    Args:
        model: With whole experts.
        plan: Its plan.
        group: Ranks that share the experts.
        ep_rank: This rank.
        holds: Whether this rank's stages have a parameter.
    """
    specs: dict[str, ShardSpec] = {}
    scopes: dict[str, Scope] = {}
    for one in plan.modules:
        here = {f"{one.root}.{name}": spec for name, spec in one.sliced.items() if holds(f"{one.root}.{name}")}
        if here:
            module, scope = model.get_submodule(one.root), Scope()
            spread_experts(module, one, group, ep_rank)
            open_in(module, scope)
            specs |= here
            scopes |= dict.fromkeys(here, scope)
    install_reads(model, specs, scopes, SharedCopy(group), ep_rank, reports=ep_rank == 0, sums=True)


def spread_experts(module: nn.Module, made: ExpertModule, group: Group, ep_rank: int) -> None:
    """Keep this rank's experts of one module, and exchange tokens for them. In place."""
    for rewrite in made.rewrites:
        value = rewrite.values[ep_rank]
        set_attribute(module.get_submodule(rewrite.module), rewrite.attribute, value)
    for name, spec in made.sliced.items():
        path, _, key = name.rpartition(".")
        shard_parameter(module.get_submodule(path), key, spec, group.size(), ep_rank)
    install_dispatch(module, made.routing, group)
