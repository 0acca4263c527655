"""Makes the plans for a whole model: shards, stages, ledger, and the expected cost of the cut.

All of it reads the model, changes nothing, and gives the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_parallel.activation_checkpointing.recompute import groups_for
from hf_parallel.engine.plan.experts import spread_over
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.head import HeadPlan, plan_head
from hf_parallel.engine.plan.held import holding_of
from hf_parallel.engine.plan.rank_limits import describe_limits
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.engine.plan.shards import Shown, plan_shards
from hf_parallel.engine.plan.share_rows import shared_rows
from hf_parallel.engine.plan.stages import Cut, plan_cut
from hf_parallel.errors import PlanError, RankMismatchError, UnsupportedError
from hf_parallel.expert_parallel.expert_plan import ExpertPlan
from hf_parallel.guards.weights.start import Start
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.mesh.ranks import compare_over_ranks
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.predict_cut import Prediction, describe, predict
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan
from hf_parallel.tensor_parallel.plan.cost import report
from hf_parallel.tensor_parallel.plan.vocab_plan import WHOLE_LOGITS
from hf_parallel.tensor_parallel.run.vocab import labelled
from hf_parallel.tensor_parallel.shard_plan import TPPlan
from hf_parallel.ulysses.attention import Shared
from hf_parallel.ulysses.forward import share_forward


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plans:
    """The plans for a model, equal on every rank.

    Args:
        forward: The genuine forward of the model, as it is when it is parallelized; it keeps logits local in training
            where the vocabulary is sharded.
        tensor_parallel: Roles and shard layouts, None with tp_size 1.
        experts: Spread of experts over replicas, None with ep_size 1.
        cut: The pipeline stages, None with pp_size 1.
        stack: Name of the list of blocks; "" where nobody had to know it.
        recomputed: Groups of its blocks that are checkpointed together.
        units: Modules whose parameters are gathered together and by themselves, where parameters are shared out.
        ledger: The full model's parameters.
        prediction: Expected cost of the cut, None with pp_size 1.
        head: Whether its logits are made for the loss.
        shown: Model that shards were planned with in place of the whole one; rank 0 knows.
        rows: The sequence that the model's ranks share, None with sp_size 1.
    """

    forward: Callable[..., Any]
    tensor_parallel: TPPlan | None
    experts: ExpertPlan | None
    cut: Cut | None
    stack: str
    recomputed: list[range]
    units: tuple[tuple[str, ...], ...]
    ledger: Ledger
    prediction: Prediction | None
    head: HeadPlan
    shown: Shown
    rows: Shared | None


def make_plans(setup: Setup, probes: Probes | None, stand_in: StandIn | None = None) -> Plans:
    """Plan on the whole model; collective where rank 0 plans or measures for all.

    Args:
        setup: The whole model.
        probes: The batches to try it with; None if nothing has to be found out.
        stand_in: For a model without values.

    Raises:
        PlanError: No stage or shard plan fits, or `tensor_parallel.on_fallback: error` and a layer has none.
        UnsupportedError: Stages that step at different times train a parameter together.
    """
    model, shape = setup.model, setup.mesh.shape
    forward: Callable[..., Any] = model.forward
    shards, found, cut, shown, head, experts = None, None, None, Shown(), HeadPlan(), None
    recomputed: list[range] = []
    units: tuple[tuple[str, ...], ...] = ()
    if probes is not None:
        with probes.running():
            found = _stack_of_blocks(setup, probes)
            forms = _forms(setup, probes, found)
            if shape.tp_size > 1:
                shards, shown = plan_shards(setup, forms, stand_in)
                # A pipeline's last stage knows that the logits are parts; nobody else sees them.
                forward = labelled(model, forward, hides_logits=shape.pp_size == 1)
            if shape.ep_size > 1:
                experts = spread_over(setup, forms, stand_in)
            if found is not None and shape.pp_size > 1:
                cut = plan_cut(setup, found, probes, forms, stand_in, shards)
            recomputed = _recomputed(setup, found, cut)
            units = _gathered_units(setup, found, probes, recomputed)
            head = plan_head(setup, forms, shards, stand_in)
    ledger = _ledger(setup, (shards or experts), cut)
    if not setup.config.pipeline.vertical_sync:
        _refuse_shared(model, ledger)
    made = Plans(
        forward=forward,
        tensor_parallel=shards,
        experts=experts,
        cut=cut,
        stack="" if found is None else found.stack,
        recomputed=recomputed,
        units=units,
        ledger=ledger,
        prediction=_prediction(setup, ledger, cut),
        head=head,
        shown=shown,
        rows=None,
    )
    return on_shared_rows(setup, made)


def on_shared_rows(setup: Setup, plans: Plans) -> Plans:
    """The plans with a forward on the part of each row that this rank has; the same plans with sp_size 1.

    Args:
        setup: The whole model, and this rank's mesh.
        plans: Plans of whole rows.
    """
    rows = shared_rows(setup)
    if rows is None:
        return plans
    hides_logits = setup.mesh.shape.pp_size == 1
    return replace(
        plans, rows=rows, forward=share_forward(setup.model, plans.forward, rows, hides_logits=hides_logits)
    )


def _forms(setup: Setup, probes: Probes, found: PipelinePlan | None) -> Forms:
    """The models that are tried for the plans; with `self_check: full` the whole one alone."""
    tries_fewer = setup.config.pipeline.tries_fewer and setup.config.tensor_parallel.tries_fewer
    return Forms(setup.model, probes.batch, found, parts=setup.mesh.shape.tp_size, tries_fewer=tries_fewer)


def _stack_of_blocks(setup: Setup, probes: Probes) -> PipelinePlan | None:
    """The blocks of the model and what passes between them, where stages, recomputation or compilation need to know."""
    if not setup.config.works_on_blocks:
        return None
    return discover_stages(
        *(setup.model, probes.discovery), cost_tokens=probes.cost_tokens, try_fewer=setup.config.pipeline.tries_fewer
    )


def _recomputed(setup: Setup, found: PipelinePlan | None, cut: Cut | None) -> list[range]:
    """The groups of blocks that are checkpointed together."""
    how = setup.config.activation_checkpointing
    if found is None or how.every is None:
        return []
    bounds = cut.bounds if cut is not None else [0, found.num_blocks]
    return groups_for(bounds, how.every, how.mode, found)


def _gathered_units(
    setup: Setup, found: PipelinePlan | None, probes: Probes, groups: Sequence[range]
) -> tuple[tuple[str, ...], ...]:
    """The blocks of the stack, which run one after the other, those of a checkpoint together; none without a stack."""
    if not setup.config.zero.shards_parameters:
        return ()
    try:
        found = found or discover_stages(setup.model, probes.discovery)
    except PlanError as error:
        logger.warning(
            "hf_parallel: no stack of blocks was found, so zero gathers the parameters of the whole model at once (%s)",
            error,
        )
        return ()
    together = {index: group for group in groups for index in group}
    units = dict.fromkeys(together.get(index, range(index, index + 1)) for index in sorted(found.ran))
    return tuple(tuple(f"{found.stack}.{index}" for index in unit) for unit in units)


def _ledger(setup: Setup, shards: TPPlan | ExpertPlan | None, cut: Cut | None) -> Ledger:
    def holds(pp_rank: int, name: str) -> bool:
        return cut is None or cut.holds(pp_rank, name)

    specs = shards.shard_specs() if shards is not None else {}
    home = cut.schedule.placement[0] if cut is not None else 0
    return build_ledger(setup.model, pp_size=setup.mesh.shape.pp_size, holds=holds, specs=specs, home=home)


def _refuse_shared(model: nn.Module, ledger: Ledger) -> None:
    """Refuse that stages which step at different times train a parameter together."""
    named = dict(model.named_parameters())
    shared = [e.name for e in ledger if e.kind == "param" and len(e.holders) > 1 and named[e.name].requires_grad]
    if shared:
        raise UnsupportedError(
            f"{shared[0]} is trained on several stages ({len(shared)} parameters are) with pipeline.vertical_sync=false: the last "
            "stage would step before the gradient of the first exists. Set pipeline.vertical_sync to true, or freeze them."
        )


def _prediction(setup: Setup, ledger: Ledger, cut: Cut | None) -> Prediction | None:
    if cut is None:
        return None
    shape = setup.mesh.shape
    holdings = [holding_of(setup.model, ledger, rank, shape.parts_size) for rank in range(shape.pp_size)]
    speeds = cut.limits.stage_speeds(cut.schedule.placement)
    return predict(cut.stages, cut.bounds, cut.costs, cut.schedule.typical(), holdings, speeds)


def summary(plans: Plans, setup: Setup) -> list[str]:
    """Lines that say what each stage holds and what share of the model is sharded."""
    lines = []
    if plans.prediction is not None and plans.cut is not None:
        lines += [*describe_limits(plans.cut.limits), *describe(plans.prediction, plans.cut.stages.stack)]
    if plans.recomputed:
        sizes = ", ".join(str(len(group)) for group in plans.recomputed)
        how = setup.config.activation_checkpointing
        kept = f", attention and one product in {how.every} kept" if how.products else ""
        where = ", inputs in host memory" if how.offload else ""
        lines.append(f"activation checkpointing: groups of {sizes} blocks of {plans.stack}{kept}{where}")
    if plans.tensor_parallel is not None:
        size = next(setup.model.parameters()).element_size()
        widened = max(size, 4) if setup.config.tensor_parallel.reduces_in_fp32 else size
        lines += report(plans.tensor_parallel, size, widened)
        whole = [f"{name} is {why}" for name, why in plans.tensor_parallel.fallbacks.items() if WHOLE_LOGITS in why]
        lines += [f"tensor parallel: {line}" for line in whole]
    lines += plans.head.describe()
    return lines


def agree(plans: Plans, setup: Setup, start: Start) -> None:
    """Compare the plans' fingerprints over the world before anything is cut; collective.

    Raises:
        RankMismatchError: On every rank.
    """
    cut = plans.cut
    mine = [
        plans.ledger.fingerprint(),
        *(plan.fingerprint() if plan else "" for plan in (plans.tensor_parallel, plans.experts)),
        ""
        if cut is None
        else "|".join(
            [
                cut.stages.fingerprint(),
                str(cut.bounds),
                str(cut.schedule.stages_of_ranks),
                cut.loss_kind,
                *cut.backward_kind,
            ]
        ),
        str(plans.units),
        str(plans.head),
    ]
    with setup.watchdog.waiting("waits for the plans of the other ranks"):
        compare_over_ranks("plan", "|".join(mine), setup.mesh.shape.describe)
    if not start.have_same_tensors:
        raise RankMismatchError(
            f"the ranks have the same parameters of {setup.name} but other buffers (names, shapes or dtypes). "
            "Build the model alike on every rank."
        )
