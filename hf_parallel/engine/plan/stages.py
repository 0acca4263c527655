"""Plans the stages: where the model is cut, which schedule runs them, and how its loss is computed over microbatches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import get_args

from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.rank_limits import RankLimits, rank_limits, stage_memory
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.errors import PlanError
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind, hooked_module, judge_backward
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, block_costs
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind, Verdict, judge_loss
from hf_parallel.pipeline_parallel.plan.measure import measure_costs
from hf_parallel.pipeline_parallel.plan.partition import partition
from hf_parallel.pipeline_parallel.plan.stage_memory import StageMemory
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span, spans_of
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cut:
    """A model on several pipeline stages.

    Args:
        stages: Crossings of each possible cut, and the parameters that each block reads.
        schedule: The schedule and where each stage runs.
        costs: Costs of every block.
        bounds: Block boundaries of the stages, [0, ..., num_blocks].
        loss_kind: Way in which the model's own loss may be computed (see `judge_loss`).
        backward_kind: Needs of users' code in backward passes (see `judge_backward`).
        limits: Limits of the ranks.
    """

    stages: PipelinePlan
    schedule: ScheduleChoice
    costs: StageCosts
    bounds: list[int]
    loss_kind: LossKind
    backward_kind: BackwardKind
    limits: RankLimits = field(default_factory=RankLimits)

    def spans_of(self, pp_rank: int) -> list[Span]:
        """The block ranges that a pipeline rank runs."""
        spans = spans_of(self.bounds)
        return [spans[stage] for stage in self.schedule.stages_of_ranks[pp_rank]]

    def holds(self, pp_rank: int, name: str) -> bool:
        """Whether a pipeline rank needs the tensor `name`."""
        return any(self.stages.holds(span, name) for span in self.spans_of(pp_rank))


def plan_cut(
    setup: Setup, stages: PipelinePlan, probes: Probes, forms: Forms, stand_in: StandIn | None, shards: TPPlan | None
) -> Cut:
    """Cut by cost; collective where costs or ranks are measured, or where the weights are not read yet.

    Args:
        setup: The whole model.
        stages: Possible cuts.
        probes: The batches to try it with.
        forms: The smaller models that stand for it.
        stand_in: For a model without values.
        shards: Sharding of the layers, None with tp_size 1.

    Raises:
        PlanError: No cut fits, or the model cannot run the batch that is measured.
    """
    limits = rank_limits(setup)
    costs = cut_costs(setup, stages, probes)
    memory = stage_memory(setup, stages, shards, limits.memory) if limits.memory is not None else None
    bounds = _bounds(stages, setup.schedule, costs, limits, memory)
    kinds = _loss_kind(setup, forms, stand_in), _backward_kind(setup, forms, stand_in)
    return Cut(stages, setup.schedule, costs, bounds, *kinds, limits)


def cut_costs(setup: Setup, plan: PipelinePlan, probes: Probes) -> StageCosts:
    """Estimate the cost of each part of the model, the same on every rank; collective with `pipeline.costs: measured`.

    Rank 0 measures while the others wait, so that all cut alike.

    Raises:
        PlanError: The model cannot run the batch that is measured.
    """
    model, config, watchdog = setup.model, setup.config, setup.watchdog
    if config.pipeline.costs == "analytic":
        by_model = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
        recomputed = by_model or config.activation_checkpointing.every is not None
        return block_costs(model, plan, recomputed=recomputed)

    def measure() -> StageCosts:
        watchdog.runs("measures the blocks")
        return measure_costs(model, plan, probes.typical)

    def explain(what: str) -> PlanError:
        return PlanError(
            f"pipeline.costs=measured: {what}. It could not train a small batch on the whole {setup.name}: set "
            "pipeline.costs to analytic."
        )

    return on_rank_zero(measure, "measures the blocks", waiting=watchdog.waiting, explain=explain)


def _bounds(
    plan: PipelinePlan, schedule: ScheduleChoice, costs: StageCosts, limits: RankLimits, memory: StageMemory | None
) -> list[int]:
    """Choose the blocks at which the stages begin and end.

    Raises:
        PlanError: A list of block counts does not fit, or names a cut that cannot be made, or no cut fits in memory.
    """
    bounds = partition(
        *(plan.num_blocks, len(schedule.placement), schedule.settings.split, costs),
        allowed=[b for b in plan.allowed_cuts() if b - 1 in plan.blocks],  # a stage must end with a block that runs
        schedule=schedule.typical(),
        speeds=limits.stage_speeds(schedule.placement),
        memory=memory,
    )
    for boundary in bounds[1:-1]:
        plan.crossings(boundary)  # raises for a cut that cannot be addressed
    return bounds


def _loss_kind(setup: Setup, forms: Forms, stand_in: StandIn | None) -> LossKind:
    """Find out how the model's loss may be computed; reports a loss that needs whole batches."""
    if stand_in is not None:
        verdict = _verdict_on_stand_in(setup, forms, stand_in)
    elif (known := setup.verdicts.get("loss")) is not None and known[0] in get_args(LossKind):
        verdict = Verdict(*known)
    else:
        verdict = _judged_loss(forms)
        setup.verdicts.put("loss", [verdict.kind, verdict.why])
    if verdict.kind == "whole" and setup.reports:
        logger.warning("hf_parallel: %s", whole_loss(setup.name, verdict.why))
    return verdict.kind


def _backward_kind(setup: Setup, forms: Forms, stand_in: StandIn | None) -> BackwardKind:
    """Find out what users' code in backward passes needs; reports it where that costs something."""
    if stand_in is not None:  # nothing can be measured; a stand-in has no hooks of users
        hooked = hooked_module(setup.model)
        kind = BackwardKind(*[f"a backward hook of {hooked} may need it"] * 2) if hooked else BackwardKind()
    else:
        kind = judge_backward(forms.few, forms.sample)  # only blocks of stock code are left out
    if setup.reports and kind.rows:
        logger.warning("hf_parallel: %s", whole_batches(setup.name, kind.rows))
    if setup.reports and kind.scale:
        logger.warning("hf_parallel: %s", twice_forward(setup.name, kind.scale))
    return kind


def whole_batches(model_name: str, why: str) -> str:
    """The warning where code in backward passes needs the gradients of whole batches: what that costs."""
    return (
        f"{model_name} runs every batch as one microbatch ({why}): right, but the stages wait for each other within a batch. Give "
        "smaller batches and a larger gradient_accumulation_steps to overlap them."
    )


def twice_forward(model_name: str, why: str) -> str:
    """The warning where code in backward passes needs the gradient of the loss as it is backpropagated: what that costs."""
    return (
        f"{model_name} runs every batch forward twice ({why}): what your loop multiplies the loss with is known only when it is "
        "backpropagated. Compute the loss from outputs.logits of a call without labels to spare the second pass."
    )


def _judged_loss(forms: Forms) -> Verdict:
    """Judge the loss on a narrow model of few blocks first, since it is made after them; the whole model decides."""
    verdict = Verdict("whole")
    for model, batch in forms.from_narrow():
        if verdict.kind == "whole":
            verdict = judge_loss(model, batch)
    return verdict


def whole_loss(model_name: str, why: str) -> str:
    """The warning where a loss cannot be put together from those of microbatches: what that costs."""
    return (
        f"the loss of {model_name} is not known to add up over microbatches ({why}), so every batch with labels runs as one "
        "microbatch: right, but the stages wait for each other within a batch. To overlap them give smaller batches "
        "and a larger gradient_accumulation_steps, or compute the loss in a compute_loss_func that divides by "
        "num_items_in_batch."
    )


def _verdict_on_stand_in(setup: Setup, forms: Forms, stand_in: StandIn) -> Verdict:
    """Rank 0 finds it out; collective."""

    def look() -> Verdict:
        return judge_loss(*stand_in.model(forms.sample))

    def explain(what: str) -> PlanError:
        return PlanError(
            f"the loss of {setup.name} cannot be tried on a small copy of the model ({what}). Load the model without "
            "hf_parallel.sharded_loading(), or set pp_size to 1."
        )

    return on_rank_zero(look, "looks at the loss", waiting=setup.watchdog.waiting, explain=explain)
