"""How speed grows with the number of GPUs, and what computation and messages have to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_parallel.errors import ConfigError
from hf_parallel.planner.candidates import smaller_clusters
from hf_parallel.planner.checks import whole
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.search import Plan, plan


@dataclass(frozen=True)
class Scaled:
    """The best plan of a part of a cluster.

    Attributes:
        plan: The plan.
        speed_up: Tokens a second, as a multiple of one GPU's share of the smallest part that fits.
        ratio: Seconds of computation for each second that messages add; None where they add none.
    """

    plan: Plan
    speed_up: float
    ratio: float | None


def scaling(
    model: Any, cluster: Cluster, *, seq_len: int, global_batch: int, layout: Mapping[str, Any] | None = None
) -> list[Scaled]:
    """The speed-up over 1, 2, 4 and more GPUs of a cluster, with as many rows for each GPU everywhere.

    Args:
        model: A transformers config, or a path to one.
        cluster: The machines, all of them.
        seq_len: Tokens of a row.
        global_batch: Rows of an optimizer step of all GPUs.
        layout: Keys that are given, as for `plan`.

    Raises:
        ConfigError: A key or value is unknown, or nothing fits, also on all GPUs.
    """
    whole("global_batch", global_batch)
    plans, words = [], ""
    for part in smaller_clusters(cluster):
        rows, odd = divmod(global_batch * part.num_gpus, cluster.num_gpus)
        if odd or (part.nodes & (part.nodes - 1) and part.nodes != cluster.nodes):
            continue
        try:
            plans.append(plan(model, part, seq_len=seq_len, global_batch=rows, layout=layout, most=1)[0])
        except ConfigError as error:
            words = str(error)
    if not plans:
        raise ConfigError(words)
    one = plans[0].estimate.tokens_per_s / plans[0].cluster.num_gpus
    return [Scaled(own, own.estimate.tokens_per_s / one, _ratio(own)) for own in plans]


def _ratio(own: Plan) -> float | None:
    found = own.estimate
    messages = found.exposed_communication_s
    return (found.step_s * (1 - found.bubble) - messages) / messages if messages > 0 else None
