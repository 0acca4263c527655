"""Proof before the first step: the planned stages and shards give the loss and the gradients of the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hf_parallel.engine.plan_stages import Cut
from hf_parallel.engine.plans import Plans
from hf_parallel.engine.setup import Setup
from hf_parallel.errors import PlanError
from hf_parallel.machine.ram import free_ram
from hf_parallel.model.probes import Probes
from hf_parallel.one_rank import on_rank_zero
from hf_parallel.pipeline_parallel.plan.verify_stages import check_split
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)

SelfCheck: TypeAlias = Literal["auto", "on", "off"]

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
            _check_stages(model, config.pipeline.self_check, plans.cut, probes.check)
            _check_shards(model, config.tensor_parallel.self_check, plans.tensor_parallel, probes.batch)

    on_rank_zero(check, "compares the planned parts with the whole model", waiting=setup.watchdog.waiting)


def _check_stages(
    model: nn.Module, self_check: SelfCheck, cut: Cut | None, samples: Sequence[Mapping[str, Any]]
) -> None:
    if cut is None:
        return
    placement = cut.schedule.stages_of_ranks
    copies = 2 * len(placement) + 3  # a reference and one model a rank, each with gradients, and one being cut
    if not _affordable(model, copies, self_check, "pipeline"):
        return
    try:
        check_split(model, cut.stages, cut.bounds, samples, lambda copied: copied.forward, placement)
    except PlanError:
        if not _outer_patched(model, cut.stages.stack):
            raise
        # A function that was put over a forward may call the forward of this very model, not that of a copy.
        check_split(
            *(model, cut.stages, cut.bounds, samples, lambda copied: _unpatched(copied, cut.stages.stack), placement)
        )
        logger.warning("hf_parallel: model.forward is patched; the self-check compared the forward of its class.")


def _outer_patched(model: nn.Module, stack: str) -> list[nn.Module]:
    """The model and what it wraps (of adapters: the model that they are on), where a forward was put over the class's."""
    named = model.named_modules()
    return [module for name, module in named if not name.startswith(f"{stack}.") and "forward" in vars(module)]


def _unpatched(copied: nn.Module, stack: str) -> Callable[..., Any]:
    for module in _outer_patched(copied, stack):
        del module.forward
    return copied.forward


def _check_shards(model: nn.Module, self_check: SelfCheck, shards: TPPlan | None, sample: Mapping[str, Any]) -> None:
    if shards is None or not _affordable(model, 2 * (shards.tp_size + 1), self_check, "tensor_parallel"):
        return
    verify_model(model, shards, sample)


def _affordable(model: nn.Module, copies: int, self_check: SelfCheck, section: str) -> bool:
    """Whether to run a self-check that needs `copies` times the parameters' memory."""
    if self_check != "auto":
        return self_check == "on"
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
