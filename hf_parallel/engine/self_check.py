"""Proof before the first step: the planned stages and shards give the loss and the gradients of the whole model."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from hf_parallel.engine.plan_stages import Cut
from hf_parallel.engine.plans import Plans
from hf_parallel.engine.setup import Setup
from hf_parallel.errors import PlanError
from hf_parallel.machine.ram import free_ram
from hf_parallel.model.fewer import fewer_blocks, with_blocks
from hf_parallel.model.probes import Probes
from hf_parallel.one_rank import on_rank_zero
from hf_parallel.pipeline_parallel.plan.verify_stages import check_split
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span, spans_of
from hf_parallel.tensor_parallel.plan.repeated import Repetition, repeated, restricted
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)

SelfCheck: TypeAlias = Literal["auto", "on", "full", "off"]

# `self_check: auto` copies the model once a stage on one rank; above this share of free memory it is skipped, loudly.
SELF_CHECK_MEMORY_SHARE = 0.25


def check_plans(setup: Setup, plans: Plans, probes: Probes) -> None:
    """Compare loss and gradients of the cut and of the sharded model with the whole one, on rank 0; all hear the verdict.

    Args:
        setup: The whole model, unchanged; its config has the `self_check` settings.
        plans: How it will be cut and sharded.
        probes: The batches to compare on.

    Raises:
        PlanError: They differ; nothing was changed.
    """
    model, config = setup.model, setup.config

    def check() -> None:
        setup.watchdog.runs("compares the planned parts with the whole model")
        with probes.running():
            if plans.cut is not None:
                tries_fewer = config.pipeline.tries_fewer
                fewer = _fewer_to_cut(model, plans.cut, probes.batch) if tries_fewer else None
                whole = _Cut(model, plans.cut.stages, plans.cut.bounds)
                placement = plans.cut.schedule.stages_of_ranks
                _check_stages(fewer or whole, config.pipeline.self_check, placement, probes.check)
            if plans.tensor_parallel is not None:
                shards = _fewer_to_shard(model, plans) or (model, plans.tensor_parallel)
                _check_shards(*shards, config.tensor_parallel.self_check, probes.batch)

    on_rank_zero(check, "compares the planned parts with the whole model", waiting=setup.watchdog.waiting)


class _Cut(NamedTuple):
    """A model, its plan, and the bounds of its stages."""

    model: nn.Module
    plan: PipelinePlan
    bounds: list[int]


def _fewer_to_cut(model: nn.Module, cut: Cut, sample: Mapping[str, Any]) -> _Cut | None:
    """Few blocks of each stage, cut as the whole model is; None where they do not show what all do."""
    plan, spans = cut.stages, spans_of(cut.bounds)
    groups, is_on_meta = [range(span.lo, span.hi) for span in spans], plan.discovered_on == "meta"
    fewer = fewer_blocks(model, plan.record, sample, groups, is_on_meta=is_on_meta)
    if fewer is None:
        return None
    small, kept = PipelinePlan(fewer.model, fewer.record, sample, plan.discovered_on), fewer.kept.blocks
    made = _Cut(fewer.model, small, [bisect_left(kept, bound) for bound in cut.bounds])
    for (lo, hi), (low, high) in zip(pairwise(cut.bounds), pairwise(made.bounds), strict=True):
        sent = [replace(key, block=kept[key.block]) for key in small.crossings(low)] if low else []
        if sent != (list(plan.crossings(lo)) if lo else []):
            return None
        is_last = hi == plan.num_blocks and lo == cut.bounds[-2]
        here, there = Span(low, high, is_last), Span(lo, hi, is_last)
        if _held(fewer.model, small, here, kept) != {n for n in _held(model, plan, there) if _is_kept(plan, n, kept)}:
            return None
    return made


def _held(model: nn.Module, plan: PipelinePlan, span: Span, kept: Sequence[int] | None = None) -> set[str]:
    """What a stage holds, by its names in the whole model."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name for name, _ in tensors if plan.holds(span, name)}
    if kept is None:
        return names
    start = f"{plan.stack}."
    moved = {}
    for name in names:
        block = plan.block_of(name)
        rest = name if block is None else name.removeprefix(start).partition(".")[2]
        moved[name] = name if block is None else f"{start}{kept[block]}.{rest}"
    return set(moved.values())


def _is_kept(plan: PipelinePlan, name: str, kept: Sequence[int]) -> bool:
    return plan.block_of(name) in (None, *kept)


def _fewer_to_shard(model: nn.Module, plans: Plans) -> tuple[nn.Module, TPPlan] | None:
    """The blocks that show what all do and their plan; None where there are none, or where others have another plan."""
    kept, plan = plans.kept, plans.tensor_parallel
    if kept is None or plan is None:
        return None
    fewer = with_blocks(model, kept.stack, kept.blocks)
    small = restricted(plan, kept.stack, kept.blocks, fewer)
    again = repeated(small, Repetition((kept.stack,), kept.shown_by), model)
    return (fewer, small) if again.fingerprint() == plan.fingerprint() else None


def _check_stages(
    cut: _Cut, self_check: SelfCheck, placement: Sequence[Sequence[int]], samples: Sequence[Mapping[str, Any]]
) -> None:
    model = cut.model
    copies = 2 * len(placement) + 3  # a reference and one model a rank, each with gradients, and one being cut
    if not _affordable(model, copies, self_check, "pipeline"):
        return
    try:
        check_split(*cut, samples, lambda copied: copied.forward, placement)
    except PlanError:
        if "forward" not in vars(model):
            raise
        # A function that was put over model.forward may call the forward of this very model, not that of a copy.
        check_split(*cut, samples, lambda copied: type(copied).forward.__get__(copied), placement)
        logger.warning("hf_parallel: model.forward is patched; the self-check compared the forward of its class.")


def _check_shards(model: nn.Module, shards: TPPlan, self_check: SelfCheck, sample: Mapping[str, Any]) -> None:
    if _affordable(model, 2 * (shards.tp_size + 1), self_check, "tensor_parallel"):
        verify_model(model, shards, sample)


def _affordable(model: nn.Module, copies: int, self_check: SelfCheck, section: str) -> bool:
    """Whether to run a self-check that needs `copies` times the parameters' memory."""
    if self_check != "auto":
        return self_check != "off"
    needed = copies * sum(p.nbytes for p in model.parameters())
    free = _free_bytes(next(model.parameters()).device)
    if needed <= SELF_CHECK_MEMORY_SHARE * free:
        return True
    logger.warning(
        "hf_parallel: %s.self_check=auto: skipped, it needs %.1f GiB for copies and %.1f GiB are free. The plan was not "
        "compared with the whole model; set %s.self_check: on to insist.",
        section,
        needed / 2**30,
        free / 2**30,
        section,
    )
    return False


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_ram()
