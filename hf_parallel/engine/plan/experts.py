"""Plans how experts are spread over replicas: rank 0 finds out, on a small model where that runs alike."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from torch import nn

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.expert_parallel.expert_plan import ExpertKind, ExpertPlan
from hf_parallel.expert_parallel.plan import find_kinds, plan_experts, stack_owners
from hf_parallel.mesh.one_rank import on_rank_zero


def spread_over(setup: Setup, forms: Forms, stand_in: StandIn | None) -> ExpertPlan:
    """The plan, the same on every rank; collective.

    Args:
        setup: The whole model.
        forms: The smaller models that stand for it.
        stand_in: For a model without values.

    Raises:
        PlanError: The model has no experts that compute the same on several ranks; names the module.
        UnsupportedError: Experts have adapters.
    """
    ep_size = setup.mesh.shape.ep_size

    def find() -> list[ExpertKind]:
        if stand_in is not None:
            model, batch = stand_in.model(forms.sample)
            return find_kinds(model, ep_size, batch)
        return _found(forms, ep_size)

    _refuse_adapters(setup.model, ep_size)
    kinds = on_rank_zero(find, "tries the experts on several ranks", waiting=setup.watchdog.waiting)
    return plan_experts(setup.model, kinds, ep_size)


def _found(forms: Forms, ep_size: int) -> list[ExpertKind]:
    """The kinds of experts in the smallest form that has some which compute the same.

    Raises:
        PlanError: The whole model, which has the last word and the names that users know, has none.
    """
    for model, batch in forms.from_narrow():
        with nullcontext() if model is forms.whole else suppress(PlanError):
            if kinds := find_kinds(model, ep_size, batch):
                return kinds
    return []


def _refuse_adapters(model: nn.Module, ep_size: int) -> None:
    owners = list(stack_owners(model))
    for name in tuner_layers(model):
        if any(owner.startswith(f"{name}.") for owner in owners):
            raise UnsupportedError(
                f"{name} has an adapter with ep_size={ep_size}: it belongs to experts, which are spread over ranks. Put adapters on "
                "other layers, or set ep_size to 1."
            )
