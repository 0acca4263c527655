"""What is found out about a whole model before it is changed: stages, shards, ledger, and what the cut will cost.

Calls 1 to 3 of five (see `plugin`): they read the model, change nothing, and give the same on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from hf_parallel.activation_checkpointing.recompute import groups_for
from hf_parallel.engine.self_check import cut_costs
from hf_parallel.errors import PlanError
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.mesh import Mesh, compare_over_ranks
from hf_parallel.model.probes import Probes
from hf_parallel.one_rank import on_rank_zero
from hf_parallel.pipeline_parallel.plan.costs import StageCosts
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind, Verdict, judge_loss
from hf_parallel.pipeline_parallel.plan.partition import partition
from hf_parallel.pipeline_parallel.plan.predict_cut import Holding, Prediction, describe, predict
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, spans_of
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.sections import ActivationCheckpointingConfig, TensorParallelConfig
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.cost import report
from hf_parallel.tensor_parallel.plan.overrides import USERS_WISH
from hf_parallel.tensor_parallel.plan.share import plan_on_one_rank
from hf_parallel.tensor_parallel.plan.vocab_plan import WHOLE_LOGITS
from hf_parallel.tensor_parallel.run.vocab import labelled
from hf_parallel.tensor_parallel.shard_plan import TPPlan
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plans:
    """What the pure calls found out, equal on every rank.

    Args:
        forward: The genuine forward of the model, as it is when it is parallelized; it keeps logits local in training
            where the vocabulary is sharded.
        tensor_parallel: Roles and shard layouts, None with tp_size 1.
        stages: Crossings and readers, None with pp_size 1.
        schedule: The schedule and where each stage runs, None with pp_size 1.
        bounds: Block boundaries of the stages, [0, ..., num_blocks]; [0, 1] with pp_size 1.
        recomputed: The stack and its groups of blocks that are checkpointed together.
        recompute: How they are.
        units: Modules whose parameters are gathered together and by themselves, where parameters are shared out.
        prediction: What the cut is expected to cost, None with pp_size 1.
        ledger: The full model's parameters.
        element_size: Bytes of one element of the parameters.
        reduces_in_fp32: Whether partial sums over tensor-parallel ranks are made and summed in fp32.
        loss_kind: How the model's own loss may be computed (see `judge_loss`).
    """

    forward: Callable[..., Any]
    tensor_parallel: TPPlan | None
    stages: PipelinePlan | None
    schedule: ScheduleChoice | None
    bounds: list[int]
    recomputed: tuple[str, list[range]]
    recompute: ActivationCheckpointingConfig
    units: tuple[tuple[str, ...], ...]
    prediction: Prediction | None
    ledger: Ledger
    element_size: int
    reduces_in_fp32: bool
    loss_kind: LossKind


@dataclass(frozen=True)
class Substitute:
    """Answers what takes values, for a model whose values are not read yet. Only rank 0 asks.

    Args:
        plan: As `plan_model`, from tp_size, sample and settings.
        model: Makes a small model that computes its loss as the model does.
    """

    plan: Callable[..., TPPlan]
    model: Callable[[], nn.Module]


def make_plans(
    model: nn.Module,
    config: HFParallelConfig,
    mesh: Mesh,
    probes: Probes | None,
    watchdog: Watchdog,
    substitute: Substitute | None = None,
) -> Plans:
    """Calls 1 to 3: pure, on the whole model; collective where costs are measured.

    Args:
        model: The whole model.
        config: The settings.
        mesh: This rank's mesh.
        probes: The batches to try it with; None if nothing has to be found out.
        watchdog: For waits.
        substitute: For a model without values.

    Raises:
        PlanError: No stage or shard plan fits, or `tensor_parallel.on_fallback: error` and a layer has none.
    """
    shape, recompute = mesh.shape, config.activation_checkpointing
    forward: Callable[..., Any] = model.forward
    tensor_parallel, stages, schedule, costs, bounds = None, None, None, None, [0, 1]
    recomputed: tuple[str, list[range]] = ("", [])
    units: tuple[tuple[str, ...], ...] = ()
    loss_kind: LossKind = "sum_over_items"
    if probes is not None:
        with probes.running():
            if shape.tp_size > 1:
                planner = partial(plan_model, model) if substitute is None else substitute.plan
                tensor_parallel = _shards(planner, shape.tp_size, probes.batch, config.tensor_parallel, watchdog)
                # A pipeline's last stage knows that the logits are parts; nobody else sees them.
                forward = labelled(model, forward, hides_logits=shape.pp_size == 1)
                expected = vocabulary_modules(model)
                judge_fallbacks(tensor_parallel, config.tensor_parallel.on_fallback, mesh.rank, expected)
            found = None
            if shape.pp_size > 1 or recompute.every is not None:
                found = discover_stages(model, probes.discovery, cost_tokens=probes.cost_tokens)
            if found is not None and shape.pp_size > 1:
                stages, schedule = found, ScheduleChoice(config.pipeline, shape.pp_size)
                costs = cut_costs(model, stages, config, probes, watchdog)
                bounds = _bounds(stages, schedule, costs)
                loss_kind = _loss_kind(model, probes.batch, substitute, watchdog, mesh.rank)
            if found is not None and recompute.every is not None:
                cuts = bounds if stages is not None else [0, found.num_blocks]
                recomputed = (found.stack, groups_for(cuts, recompute.every, recompute.mode, found))
            if config.zero.shards_parameters:
                units = _gathered_units(model, found, probes, recomputed[1])
    spans = spans_of(bounds)

    def holds(pp_rank: int, name: str) -> bool:
        if stages is None or schedule is None:
            return True
        return any(stages.holds(spans[s], name) for s in schedule.stages_of_ranks[pp_rank])

    specs = tensor_parallel.shard_specs() if tensor_parallel is not None else {}
    home = schedule.placement[0] if schedule is not None else 0
    ledger = build_ledger(model, pp_size=shape.pp_size, holds=holds, specs=specs, home=home)
    prediction = None
    if stages is not None and schedule is not None and costs is not None:
        holdings = [holding_of(model, ledger, rank, shape.tp_size) for rank in range(shape.pp_size)]
        prediction = predict(stages, bounds, costs, schedule.typical(), holdings)
    return Plans(
        forward=forward,
        tensor_parallel=tensor_parallel,
        stages=stages,
        schedule=schedule,
        bounds=bounds,
        recomputed=recomputed,
        recompute=recompute,
        units=units,
        prediction=prediction,
        ledger=ledger,
        element_size=next(model.parameters()).element_size(),
        reduces_in_fp32=config.tensor_parallel.reduce_dtype == "float32",
        loss_kind=loss_kind,
    )


def _loss_kind(
    model: nn.Module, sample: Mapping[str, Any], substitute: Substitute | None, watchdog: Watchdog, rank: int
) -> LossKind:
    """How the model's loss may be computed, said aloud where it needs whole batches."""
    verdict = _verdict_on_loss(model, sample, substitute, watchdog)
    if verdict.kind == "whole" and rank == 0:
        logger.warning("hf_parallel: %s", whole_loss(type(model).__name__, verdict.why))
    return verdict.kind


def whole_loss(model_name: str, why: str) -> str:
    """What it costs that a loss cannot be put together from those of microbatches."""
    return (
        f"the loss of {model_name} is not known to add up over microbatches ({why}), so every batch runs as one "
        "microbatch: right, but the stages wait for each other within a batch. To overlap them give smaller batches "
        "and a larger gradient_accumulation_steps, or compute the loss in a compute_loss_func that divides by "
        "num_items_in_batch."
    )


def _verdict_on_loss(
    model: nn.Module, sample: Mapping[str, Any], substitute: Substitute | None, watchdog: Watchdog
) -> Verdict:
    """With a substitute collective: rank 0 finds it out."""
    if substitute is None:
        return judge_loss(model, sample)
    stand_in = substitute.model

    def look() -> Verdict:
        here = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in sample.items()}
        return judge_loss(stand_in(), here)

    def explain(what: str) -> PlanError:
        return PlanError(f"the loss of {type(model).__name__} cannot be looked at on a small model like it ({what}).")

    return on_rank_zero(look, "looks at the loss", waiting=watchdog.waiting, explain=explain)


def _shards(
    plan: Callable[..., TPPlan],
    tp_size: int,
    sample: Mapping[str, Any],
    settings: TensorParallelConfig,
    watchdog: Watchdog,
) -> TPPlan:
    """The plan that rank 0 makes, on every rank; collective.

    Args:
        plan: `plan_model` of the model, or what stands for it.
        tp_size: Ranks that share each layer.
        sample: The batch to plan with.
        settings: What the user wants of modules, of the loss and of the sequence.
        watchdog: For waits.
    """

    def make() -> TPPlan:
        overrides = None if settings.plan == "auto" else settings.plan
        wishes: dict[str, Any] = {"vocabulary": settings.vocab_parallel_loss, "experts": settings.experts}
        wishes["sequence"] = settings.sequence_parallel
        return plan(tp_size, sample, overrides=overrides, **wishes)

    return plan_on_one_rank(make, watchdog.waiting)


def _gathered_units(
    model: nn.Module, found: PipelinePlan | None, probes: Probes, groups: Sequence[range]
) -> tuple[tuple[str, ...], ...]:
    """The blocks of the stack, which run one after the other, those of a checkpoint together; none without a stack."""
    try:
        found = found or discover_stages(model, probes.discovery)
    except PlanError as error:
        logger.warning(
            "hf_parallel: no stack of blocks was found, so zero gathers the parameters of the whole model at once (%s)",
            error,
        )
        return ()
    together = {index: group for group in groups for index in group}
    units = dict.fromkeys(together.get(index, range(index, index + 1)) for index in sorted(found.ran))
    return tuple(tuple(f"{found.stack}.{index}" for index in unit) for unit in units)


def _bounds(plan: PipelinePlan, schedule: ScheduleChoice, costs: StageCosts) -> list[int]:
    """Where the stages begin and end.

    Raises:
        PlanError: A list of block counts does not fit, or names a cut that cannot be made.
    """
    bounds = partition(
        *(plan.num_blocks, len(schedule.placement), schedule.settings.split, costs),
        allowed=[b for b in plan.allowed_cuts() if b - 1 in plan.blocks],  # a stage must end with a block that runs
        schedule=schedule.typical(),
    )
    for boundary in bounds[1:-1]:
        plan.crossings(boundary)  # raises for a cut that cannot be addressed
    return bounds


def holding_of(model: nn.Module, ledger: Ledger, pp_rank: int, tp_size: int) -> Holding:
    """What tp rank 0 of a pipeline rank keeps of a model that is still whole."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    sizes: list[tuple[int, int, bool]] = []
    for entry in ledger.held_by(pp_rank, "param"):
        count = math.prod(entry.shape)
        if entry.spec is not None:
            count = count // entry.spec.full_size * entry.spec.local_size(tp_size, 0)
        sizes.append((count, count * entry.dtype.itemsize, entry.name in trained))
    learned = sum(size for _, size, trains in sizes if trains)
    return Holding(sum(n for n, _, _ in sizes), sum(size for _, size, _ in sizes), learned, 2 * learned)


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
    wanted = ("gathered: " + USERS_WISH, "replicated: " + USERS_WISH)
    fallbacks = {n: why for n, why in plan.fallbacks.items() if n not in expected and not why.startswith(wanted)}
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
    if plans.prediction is not None and plans.stages is not None:
        lines += describe(plans.prediction, plans.stages.stack)
    if plans.recomputed[1]:
        sizes = ", ".join(str(len(group)) for group in plans.recomputed[1])
        kept = f", attention and one product in {plans.recompute.every} kept" if plans.recompute.products else ""
        where = ", inputs in host memory" if plans.recompute.offload else ""
        lines.append(f"activation checkpointing: groups of {sizes} blocks of {plans.recomputed[0]}{kept}{where}")
    if plans.tensor_parallel is not None:
        size = plans.element_size
        lines += report(plans.tensor_parallel, size, max(size, 4) if plans.reduces_in_fp32 else size)
        whole = [f"{name} is {why}" for name, why in plans.tensor_parallel.fallbacks.items() if WHOLE_LOGITS in why]
        lines += [f"tensor parallel: {line}" for line in whole]
    return lines


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
        str(plans.units),
        plans.loss_kind,
    ]
    compare_over_ranks("plan", "|".join(mine), mesh.shape.describe)
