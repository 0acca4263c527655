"""One plan for all ranks: made on rank 0, sent as JSON, checked by its hash."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch.distributed as dist

from hf_parallel.errors import PlanError
from hf_parallel.mesh.one_rank import Waiting, on_rank_zero
from hf_parallel.tensor_parallel.shard_plan import TPPlan


def plan_on_one_rank(make: Callable[[], TPPlan], waiting: Waiting | None = None) -> TPPlan:
    """`make()` of rank 0, on every rank; collective over the default group.

    Args:
        make: Makes the plan; called on rank 0 alone.
        waiting: Marks a block that waits for other ranks.

    Raises:
        PlanError: `make` failed on rank 0 (with the same error on every rank), or the ranks received different plans.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()

    def send() -> tuple[str, str]:
        plan = make()
        return json.dumps(plan.to_json()), plan.fingerprint()

    text, fingerprint = on_rank_zero(
        send,
        "plans the shards",
        waiting=waiting,
        explain=lambda what: PlanError(f"shards could not be planned: {what}. Set tp_size to 1."),
    )
    plan = TPPlan.from_json(json.loads(text))
    if plan.fingerprint() != fingerprint:
        raise PlanError(
            f"the tensor-parallel plan of rank 0 has fingerprint {fingerprint}, here it reads as {plan.fingerprint()}. "
            "Run the same version of hf_parallel on every rank."
        )
    return plan
