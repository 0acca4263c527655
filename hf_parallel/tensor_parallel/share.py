"""One plan for all ranks: made on rank 0, sent as JSON, checked by its hash."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.plan import TPPlan


def plan_on_one_rank(make: Callable[[], TPPlan]) -> TPPlan:
    """`make()` of rank 0, on every rank; collective over the default group.

    Args:
        make: Makes the plan; called on rank 0 alone.

    Raises:
        PlanError: `make` failed on rank 0 (every rank hears why), or the plan changed on its way.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    sent: list[Any] = [None]
    if dist.get_rank() == 0:
        sent = [_outcome(make)]
    dist.broadcast_object_list(sent, src=0)
    text, fingerprint, error = sent[0]
    if error:
        raise PlanError(error)
    plan = TPPlan.from_json(json.loads(text))
    if plan.fingerprint() != fingerprint:
        raise PlanError(
            f"the tensor-parallel plan of rank 0 has fingerprint {fingerprint}, here it reads as {plan.fingerprint()}. "
            "Run the same version of hf_parallel on every rank."
        )
    return plan


def _outcome(make: Callable[[], TPPlan]) -> tuple[str, str, str]:
    """The plan as JSON and its fingerprint, or what went wrong: the other ranks must not wait for a plan."""
    try:
        plan = make()
    except Exception as error:  # noqa: BLE001  told to every rank, raised there
        return (
            "",
            "",
            str(error) if isinstance(error, PlanError) else f"planning failed: {type(error).__name__}: {error}",
        )
    return json.dumps(plan.to_json()), plan.fingerprint(), ""
