"""Plans how experts are spread over replicas: rank 0 finds out, on a small model where that runs alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.expert_parallel.expert_plan import ExpertKind, ExpertPlan
from hf_parallel.expert_parallel.plan import find_kinds, plan_experts, stack_owners
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.model.narrow import narrow_model
from hf_parallel.model.probes import Probes
from hf_parallel.model.stack import candidate_stacks


def spread_over(setup: Setup, probes: Probes, stand_in: StandIn | None) -> ExpertPlan:
    """The plan, the same on every rank; collective.

    Args:
        setup: The whole model.
        probes: The batches to try it with.
        stand_in: For a model without values.

    Raises:
        PlanError: The model has no experts that compute the same on several ranks; names the module.
        UnsupportedError: Experts have adapters.
    """
    ep_size = setup.mesh.shape.ep_size

    def find() -> list[ExpertKind]:
        model, batch = _small(setup.model, probes.batch) if stand_in is None else stand_in.model(probes.batch)
        return find_kinds(model, ep_size, batch)

    _refuse_adapters(setup.model, ep_size)
    kinds = on_rank_zero(find, "tries the experts on several ranks", waiting=setup.watchdog.waiting)
    return plan_experts(setup.model, kinds, ep_size)


def _small(model: nn.Module, sample: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
    """A narrow model that runs as this one does, and the batch for it; this one where there is none."""
    try:
        narrow = narrow_model(model, candidate_stacks(model)[0], sample)
    except PlanError:  # no list of blocks
        return model, sample
    return (model, sample) if narrow is None else (narrow.model, narrow.batch(sample))


def _refuse_adapters(model: nn.Module, ep_size: int) -> None:
    owners = list(stack_owners(model))
    for name in tuner_layers(model):
        if any(owner.startswith(f"{name}.") for owner in owners):
            raise UnsupportedError(
                f"{name} has an adapter with ep_size={ep_size}: it belongs to experts, which are spread over ranks. Put adapters on "
                "other layers, or set ep_size to 1."
            )
