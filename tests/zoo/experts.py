"""One entry of the zoo with its experts on two ranks, which are threads that exchange tokens of batches of their own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.expert_parallel.apply import apply_expert_parallel
from hf_parallel.expert_parallel.expert_plan import ExpertPlan
from hf_parallel.expert_parallel.plan import find_kinds, plan_experts
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_virtual_ranks, virtual_groups
from zoo.models import build, quiet, why_not
from zoo.sweep import FLOOR, TOLERANCE, deadline, relative, samples_of, verdict_of


RANKS = 2
NO_EXPERTS = "has no module that owns stacks of experts"


@dataclass
class ExpertRow:
    """What the sweep found out about one entry.

    Args:
        name: Type, or type@variant.
        verdict: "exact"; "refused": the product said why not; "no experts"; "unusable": the model cannot train; "failed".
        modules: Modules whose experts are spread.
        share: Share of the parameters in them.
        difference: Largest relative difference of a loss or a gradient.
        note: What was said.
    """

    name: str
    verdict: str = "failed"
    modules: int = 0
    share: float = 0.0
    difference: float | None = None
    note: str = ""


def sweep_experts(name: str, seconds: int = 240) -> ExpertRow:
    """Everything about one entry; never raises."""
    row = ExpertRow(name)
    try:
        with deadline(seconds), quiet():
            row.note = why_not(name) or ""
            row.verdict = "unusable" if row.note else row.verdict
            if not row.note:
                _examine(row, build(name))
    except Exception as error:
        row.verdict, row.note = verdict_of(error)
        if NO_EXPERTS in row.note:
            row.verdict, row.note = "no experts", ""
    return row


def _examine(row: ExpertRow, model: nn.Module) -> None:
    samples = samples_of(row.name, model)
    plan = plan_experts(model, find_kinds(model, RANKS, samples[0]), RANKS)
    specs = plan.shard_specs()
    total = sum(p.numel() for p in model.parameters())
    row.modules = len(plan.modules)
    row.share = sum(p.numel() for name, p in model.named_parameters() if name in specs) / total
    row.difference = difference(model, plan, samples)
    row.verdict = "exact" if row.difference <= TOLERANCE else "failed"
    row.note = "" if row.verdict == "exact" else f"differs by {row.difference:.1e}"


def difference(model: nn.Module, plan: ExpertPlan, samples: list[dict[str, Any]]) -> float:
    """Largest relative difference of losses and gradients in training mode: one rank a batch against one process with both.

    A gradient is compared by its largest element, those of experts put together, all others summed over the ranks.
    """
    whole = [_measure(copy.deepcopy(model), sample) for sample in samples]
    groups = virtual_groups(plan.ep_size, 60.0)
    models = [copy.deepcopy(model) for _ in groups]
    for rank, (mine, group) in enumerate(zip(models, groups, strict=True)):
        apply_expert_parallel(mine, plan, group, rank, lambda name: True)
    ranks = run_virtual_ranks(groups, lambda rank: _measure(models[rank], samples[rank]))
    errors = [relative(one[0], other[0], 0.0) for one, other in zip(whole, ranks, strict=True)]
    expected = {name: _sum([grads[name] for _, grads in whole]) for name in whole[0][1]}
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
    specs = plan.shard_specs()
    for name, grad in expected.items():
        parts = [grads[name] for _, grads in ranks]
        if name in specs and grad is not None:
            found = specs[name].assemble([part for part in parts if part is not None])
        else:
            found = _sum(parts)
        errors.append(relative(grad, found, FLOOR * largest))
    return max(errors)


def _measure(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    with torch.enable_grad():
        loss = model.train()(**sample).loss
        loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _sum(grads: list[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return torch.stack(present).sum(0) if present else None
