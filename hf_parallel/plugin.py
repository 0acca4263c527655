"""Where the strategies meet: one model, one config, five visible calls.

`plan_tensor_parallel`, `discover_stages` and `build_ledger` read the whole model and change nothing; `transform` cuts it
to this rank's stage and shards what is left, in place; `attach` puts the engine in. Plans are compared across ranks
before anything is changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hf_parallel.batches import BatchCheck
from hf_parallel.config import HFParallelConfig
from hf_parallel.engine import Attachment, DirectEngine, Engine
from hf_parallel.errors import PlanError
from hf_parallel.gradients import GradientSync
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.mesh import Mesh
from hf_parallel.pipeline_engine import PipelineEngine
from hf_parallel.pipeline_parallel.discover import discover_stages
from hf_parallel.pipeline_parallel.messages import Probe
from hf_parallel.pipeline_parallel.partition import block_costs, partition
from hf_parallel.pipeline_parallel.plan import PipelinePlan, spans_of
from hf_parallel.pipeline_parallel.programs import Programs, ScheduleChoice
from hf_parallel.pipeline_parallel.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.samples import probe_samples
from hf_parallel.pipeline_parallel.selfcheck import LossKind, loss_normalisation
from hf_parallel.pipeline_parallel.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.transport import make_transport
from hf_parallel.pipeline_parallel.weight_gradients import WeightGradients
from hf_parallel.preflight import check_plans, compare_over_ranks, probe_batch, refuse_model, vocab_size
from hf_parallel.tensor_parallel.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan import TPPlan
from hf_parallel.tensor_parallel.vocab import labelled
from hf_parallel.tensor_parallel.vocab_plan import WHOLE_LOGITS, shard_vocabulary
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plans:
    """What the pure calls found out, equal on every rank.

    Args:
        forward: The genuine forward of the model, as it is when it is parallelized.
        tensor_parallel: Roles and shard layouts, None with tp_size 1.
        stages: Crossings and readers, None with pp_size 1.
        schedule: The schedule and where each stage runs, None with pp_size 1.
        bounds: Block boundaries of the stages, [0, ..., num_blocks]; [0, 1] with pp_size 1.
        ledger: The full model's parameters.
        loss_kind: How the model's own loss is normalised (see `loss_normalisation`).
    """

    forward: Callable[..., Any]
    tensor_parallel: TPPlan | None
    stages: PipelinePlan | None
    schedule: ScheduleChoice | None
    bounds: list[int]
    ledger: Ledger
    loss_kind: LossKind


def parallelize(
    model: nn.Module, config: HFParallelConfig, mesh: Mesh, *, device: torch.device, watchdog: Watchdog
) -> Engine:
    """Turn a whole model into this rank's part of it; collective.

    Args:
        model: A causal language model, whole, the same on every rank.
        config: The validated settings.
        mesh: This rank's mesh.
        device: Where the model is.
        watchdog: For waits.

    Returns:
        The engine, installed as `model.forward`.

    Raises:
        PlanError, ConfigError, UnsupportedError: The model cannot be parallelized as asked; nothing was changed.
        RankMismatchError: Ranks made different plans; nothing was changed.
    """
    refuse_model(model, mesh.shape.mp_size)
    watchdog.runs("plans the stages and shards")
    plans = make_plans(model, config, mesh, device)
    with watchdog.waiting("waits for the plans of the other ranks"):
        agree(plans, mesh)
    placement = plans.schedule.stages_of_ranks if plans.schedule is not None else ()
    check_plans(model, config, plans.stages, plans.bounds, placement, plans.tensor_parallel, watchdog=watchdog)
    pieces = transform(model, plans, mesh)
    engine = attach(model, pieces, plans, config, mesh, device=device, watchdog=watchdog)
    watchdog.runs()
    if mesh.rank == 0:
        for line in summary(plans):
            logger.warning("hf_parallel: %s", line)
    return engine


def make_plans(model: nn.Module, config: HFParallelConfig, mesh: Mesh, device: torch.device) -> Plans:
    """Calls 1 to 3: pure, on the whole model.

    Raises:
        PlanError: No stage or shard plan fits, or `tensor_parallel.on_fallback: error` and a layer has none.
    """
    shape = mesh.shape
    if shape.mp_size == 1:
        ledger = build_ledger(model, pp_size=1, holds=lambda pp_rank, name: True, specs={})
        return Plans(model.forward, None, None, None, [0, 1], ledger, "sum_over_items")
    sample = probe_batch(model, device)
    tensor_parallel = plan_tensor_parallel(model, shape.tp_size, sample) if shape.tp_size > 1 else None
    forward: Callable[..., Any] = model.forward
    if tensor_parallel is not None:
        wish = config.tensor_parallel.vocab_parallel_loss
        tensor_parallel = shard_vocabulary(model, tensor_parallel, sample, wish)
        # A pipeline's last stage knows that the logits are parts; nobody else sees them.
        forward = labelled(model, forward, hides_logits=shape.pp_size == 1)
        judge_fallbacks(tensor_parallel, config.tensor_parallel.on_fallback, mesh.rank, vocabulary_modules(model))
    stages, schedule, bounds = None, None, [0, 1]
    loss_kind: LossKind = "sum_over_items"
    if shape.pp_size > 1:
        stages = discover_stages(model, probe_samples(model, vocab_size(model), device))
        schedule = ScheduleChoice(config.pipeline, shape.pp_size)
        num_stages = len(schedule.placement)
        bounds = partition(stages.num_blocks, num_stages, config.pipeline.split, block_costs(model, stages))
        for boundary in bounds[1:-1]:
            stages.crossings(boundary)  # raises for a cut that cannot be addressed
        loss_kind = loss_normalisation(model, sample)

    spans = spans_of(bounds)

    def holds(pp_rank: int, name: str) -> bool:
        if stages is None or schedule is None:
            return True
        return any(stages.holds(spans[s], name) for s in schedule.stages_of_ranks[pp_rank])

    specs = tensor_parallel.shard_specs() if tensor_parallel is not None else {}
    home = schedule.placement[0] if schedule is not None else 0
    ledger = build_ledger(model, pp_size=shape.pp_size, holds=holds, specs=specs, home=home)
    return Plans(forward, tensor_parallel, stages, schedule, bounds, ledger, loss_kind)


def vocabulary_modules(model: nn.Module) -> frozenset[str]:
    """Names of the input embedding and the head: why they are not sharded over the vocabulary is reported apart."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    return frozenset(name for name, module in model.named_modules() if any(module is end for end in ends))


def judge_fallbacks(
    plan: TPPlan, on_fallback: Literal["warn", "error", "ignore"], rank: int, expected: frozenset[str]
) -> None:
    """Report layers that are not column-row pairs: they cost an all-gather each, or are not sharded at all.

    Raises:
        PlanError: `on_fallback` is "error" and there are such layers beside the `expected` ones.
    """
    fallbacks = {name: reason for name, reason in plan.fallbacks.items() if name not in expected}
    if not fallbacks or on_fallback == "ignore":
        return
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(fallbacks.items())[:3])
    text = f"tensor_parallel: {len(fallbacks)} layers are not column-row pairs, among them {shown}."
    if on_fallback == "error":
        raise PlanError(f"{text} Set tensor_parallel.on_fallback to warn, or choose a tp_size that divides the heads.")
    if rank == 0:
        logger.warning("hf_parallel: %s", text)


def summary(plans: Plans) -> list[str]:
    """Lines that say what each stage holds and what share of the model is sharded."""
    lines = []
    if plans.stages is not None and plans.schedule is not None:
        for rank, stages in enumerate(plans.schedule.stages_of_ranks):
            held = sum(math.prod(entry.shape) for entry in plans.ledger.held_by(rank, "param"))
            parts = ", ".join(_blocks_text(stage, *plans.bounds[stage : stage + 2]) for stage in stages)
            lines.append(f"pp {rank}: {parts} of {plans.stages.stack}, {held / 1e6:.1f}M parameters")
    if plans.tensor_parallel is not None:
        share = plans.tensor_parallel.coverage()
        lines.append(
            f"tensor parallel: {share.paired:.0%} of the parameters in column-row pairs, {share.gathered:.0%} sharded "
            f"with gathered outputs, {share.replicated:.0%} replicated"
        )
        whole = [f"{name} is {why}" for name, why in plans.tensor_parallel.fallbacks.items() if WHOLE_LOGITS in why]
        lines += [f"tensor parallel: {line}" for line in whole]
    return lines


def _blocks_text(stage: int, lo: int, hi: int) -> str:
    return f"stage {stage} with " + (f"blocks {lo} to {hi - 1}" if hi > lo else "the head alone, behind the blocks")


def agree(plans: Plans, mesh: Mesh) -> None:
    """Compare the plans' fingerprints over the world before anything is cut; collective.

    Raises:
        RankMismatchError: On every rank.
    """
    mine = [
        plans.ledger.fingerprint(),
        plans.tensor_parallel.fingerprint() if plans.tensor_parallel else "",
        plans.stages.fingerprint() if plans.stages else "",
        str(plans.bounds),
        str(plans.schedule.stages_of_ranks) if plans.schedule else "",
    ]
    compare_over_ranks("plan", "|".join(mine), mesh.shape.describe)


@dataclass(frozen=True)
class Pieces:
    """What `transform` leaves of a model on a rank of several.

    Args:
        stages: Stage index -> stage.
        weights: What puts off weight gradients, for a schedule that splits backwards.
    """

    stages: Mapping[int, Stage]
    weights: WeightGradients | None


def transform(model: nn.Module, plans: Plans, mesh: Mesh) -> Pieces | None:
    """Call 4: cut to this rank's stages, then shard what they hold. In place; Parameter identity survives.

    Returns:
        The stages of this rank; None with pp_size 1.
    """
    pieces = None
    if plans.stages is not None and plans.schedule is not None:
        mine = plans.schedule.stages_of_ranks[mesh.pp_rank]
        stages = cut_stages(model, plans.stages, plans.bounds, mine, plans.forward)
        # Before sharding: it knows plain layers only, and a sharded layer takes over what it finds.
        pieces = Pieces(stages, WeightGradients(model) if plans.schedule.splits_backward else None)
    if plans.tensor_parallel is not None and mesh.tp_group is not None:
        apply_tensor_parallel(
            model,
            plans.tensor_parallel,
            mesh.tp_group,
            mesh.tp_rank,
            holds=lambda name: plans.ledger.holds(mesh.pp_rank, name),
            deferral=None if pieces is None else pieces.weights,
        )
    return pieces


def attach(
    model: nn.Module,
    pieces: Pieces | None,
    plans: Plans,
    config: HFParallelConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    watchdog: Watchdog,
) -> Engine:
    """Call 5: groups, reduction, engine; the model trains from here on."""
    parameters, buffers = held_tensors(model, plans.ledger, mesh.pp_rank)
    attachment = Attachment(
        model=model,
        forward=plans.forward,
        device=device,
        mesh=mesh,
        ledger=plans.ledger,
        parameters=parameters,
        buffers=buffers,
        gradients=GradientSync(plans.ledger, parameters, mesh),
        batch_check=BatchCheck(mesh, config.monitor.batch_check_steps),
        watchdog=watchdog,
    )
    engine = (
        DirectEngine(attachment)
        if pieces is None or plans.schedule is None
        else _pipeline_engine(attachment, pieces, plans.schedule, plans.loss_kind)
    )
    engine.install()
    return engine


def _pipeline_engine(
    attachment: Attachment, pieces: Pieces, schedule: ScheduleChoice, loss_kind: LossKind
) -> PipelineEngine:
    mesh, watchdog, settings = attachment.mesh, attachment.watchdog, schedule.settings
    groups = [group for group in (mesh.pp_down_group, mesh.pp_up_group) if group is not None]
    down, up = (make_transport(settings.transport, attachment.device, group) for group in groups)
    runtime = PipelineRuntime(
        pieces.stages,
        schedule.placement,
        mesh.pp_rank,
        (down, up),
        probe=Probe(waits=watchdog.waits, runs=watchdog.runs),
        weights=pieces.weights,
    )
    count = settings.num_microbatches
    return PipelineEngine(
        attachment,
        runtime,
        programs=Programs(schedule, mesh.pp_rank),
        num_microbatches=2 * mesh.shape.pp_size if count == "auto" else count,
        loss_kind=loss_kind,
    )


def held_tensors(
    model: nn.Module, ledger: Ledger, pp_rank: int
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Ledger name -> the tensor this rank holds; everything else that is still real is frozen.

    Raises:
        PlanError: The ledger expects a tensor here that the model does not have.
    """
    real = dict(model.named_parameters(remove_duplicate=False))
    real_buffers = dict(model.named_buffers(remove_duplicate=False))
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for entry in ledger.held_by(pp_rank):
        source: Mapping[str, torch.Tensor] = real if entry.kind == "param" else real_buffers
        tensor = next((source[alias] for alias in entry.aliases if alias in source), None)
        if tensor is None:
            raise PlanError(f"{entry.name} should be on pipeline rank {pp_rank} but the cut model does not have it.")
        if isinstance(tensor, nn.Parameter):
            parameters[entry.name] = tensor
        else:
            buffers[entry.name] = tensor
    held = {id(parameter) for parameter in parameters.values()}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.requires_grad_(False)
    return parameters, buffers
