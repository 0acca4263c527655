"""The plan of a whole model: its layers, then its vocabulary, then the sequence between the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from hf_parallel.settings.sections import ExpertSharing, Treatment
from hf_parallel.tensor_parallel.plan.derive import plan_and_foreign
from hf_parallel.tensor_parallel.plan.sequence_plan import shard_sequence
from hf_parallel.tensor_parallel.plan.ties import aliases_of
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary
from hf_parallel.tensor_parallel.shard_plan import TPPlan


def plan_model(
    model: nn.Module,
    tp_size: int,
    sample: Mapping[str, Any],
    *,
    overrides: Mapping[str, Treatment] | None = None,
    vocabulary: Literal["auto"] | bool = "auto",
    experts: ExpertSharing = "split",
    sequence: bool = False,
) -> TPPlan:
    """`plan_tensor_parallel`, then `shard_vocabulary`, then `shard_sequence`.

    Args:
        model: The full model with materialised weights; unchanged.
        tp_size: Number of tensor-parallel ranks, >= 1.
        sample: Keyword arguments of a forward pass.
        overrides: Pattern of module names -> "pair", "gather" or "replicate"; none: everything is derived.
        vocabulary: `tensor_parallel.vocab_parallel_loss`.
        experts: `tensor_parallel.experts`.
        sequence: `tensor_parallel.sequence_parallel`.

    Raises:
        PlanError: For the reasons of those three.
    """
    plan, foreign = plan_and_foreign(model, tp_size, sample, overrides, experts)
    plan = shard_vocabulary(model, plan, sample, vocabulary, overrides, foreign)
    plan = shard_sequence(model, plan, sample) if sequence and tp_size > 1 else plan
    return replace(plan, aliases=aliases_of(model, plan.shard_specs()))
