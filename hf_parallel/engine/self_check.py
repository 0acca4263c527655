"""What is checked before a model is changed: that it can be parallelized, that all ranks mean the same, that plans are right.

Everything here leaves the model as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.machine.ram import free_ram
from hf_parallel.model.probes import Probes
from hf_parallel.one_rank import on_rank_zero
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, block_costs
from hf_parallel.pipeline_parallel.plan.measure import measure_costs
from hf_parallel.pipeline_parallel.plan.verify_stages import check_split
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.shard_plan import TPPlan
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)

Wish: TypeAlias = Literal["auto", "on", "off"]

# `self_check: auto` copies the model once a stage on one rank; above this share of free memory it is skipped, loudly.
SELF_CHECK_MEMORY_SHARE = 0.25


def cut_costs(
    model: nn.Module, plan: PipelinePlan, config: HFParallelConfig, probes: Probes, watchdog: Watchdog
) -> StageCosts:
    """What each part of the model costs, the same on every rank; collective with `pipeline.costs: measured`.

    Rank 0 measures while the others wait, so that all cut alike.

    Raises:
        PlanError: The model cannot run the batch that is measured.
    """
    if config.pipeline.costs == "analytic":
        recomputed = config.activation_checkpointing.every is not None
        return block_costs(model, plan, recomputed=recomputed or getattr(model, "is_gradient_checkpointing", False))

    def measure() -> StageCosts:
        watchdog.runs("measures the blocks")
        return measure_costs(model, plan, probes.typical)

    def explain(what: str) -> PlanError:
        return PlanError(
            f"pipeline.costs=measured: {what}. It could not train a small batch on the whole {type(model).__name__}: set "
            "pipeline.costs to analytic."
        )

    return on_rank_zero(measure, "measures the blocks", waiting=watchdog.waiting, explain=explain)


def check_plans(
    model: nn.Module,
    config: HFParallelConfig,
    stages: PipelinePlan | None,
    bounds: list[int],
    placement: Sequence[Sequence[int]],
    shards: TPPlan | None,
    *,
    probes: Probes,
    watchdog: Watchdog,
) -> None:
    """Compare loss and gradients of the cut and of the sharded model with the whole one, on rank 0; all hear the verdict.

    Args:
        model: The whole model; unchanged.
        config: For the `self_check` settings.
        stages: How it will be cut, or None.
        bounds: Block boundaries of the stages.
        placement: The stages of each rank.
        shards: How it will be sharded, or None.
        probes: The batches to compare on.
        watchdog: For the wait.

    Raises:
        PlanError: They differ; nothing was changed.
    """

    def check() -> None:
        watchdog.runs("compares the planned parts with the whole model")
        with probes.running():
            _check_stages(model, config.pipeline.self_check, stages, bounds, placement, probes.check)
            _check_shards(model, config.tensor_parallel.self_check, shards, probes.batch)

    on_rank_zero(check, "compares the planned parts with the whole model", waiting=watchdog.waiting)


def _check_stages(
    model: nn.Module,
    wish: Wish,
    stages: PipelinePlan | None,
    bounds: list[int],
    placement: Sequence[Sequence[int]],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    copies = 2 * len(placement) + 3  # a reference and one model a rank, each with gradients, and one being cut
    if stages is None or not _affordable(model, copies, wish, "pipeline"):
        return
    try:
        check_split(model, stages, bounds, samples, lambda copied: copied.forward, placement)
    except PlanError:
        if "forward" not in vars(model):
            raise
        # A function that was put over model.forward may call the forward of this very model, not that of a copy.
        check_split(model, stages, bounds, samples, lambda copied: type(copied).forward.__get__(copied), placement)
        logger.warning("hf_parallel: model.forward is patched; the self-check compared the forward of its class.")


def _check_shards(model: nn.Module, wish: Wish, shards: TPPlan | None, sample: Mapping[str, Any]) -> None:
    if shards is None or not _affordable(model, 2 * (shards.tp_size + 1), wish, "tensor_parallel"):
        return
    verify_model(model, shards, sample)


def _affordable(model: nn.Module, copies: int, wish: Wish, section: str) -> bool:
    """Whether to run a self-check that needs `copies` times the parameters' memory."""
    if wish != "auto":
        return wish == "on"
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
