"""Where the strategies meet: one model, one config, five visible calls.

`plan_tensor_parallel`, `discover_stages` and `build_ledger` read the whole model and change nothing (see `planning`);
`transform` cuts it to this rank's stages and shards what is left, in place; `attach` puts the engine in. Plans are
compared across ranks before anything is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from hf_parallel.activation_checkpointing.host_copies import Follow
from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.batches import BatchCheck, RandomCheck
from hf_parallel.checkpoints.weights.unread import unread_of
from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.data_parallel.host import pins
from hf_parallel.data_parallel.replicas import ReplicaSettings
from hf_parallel.engine.direct import Attachment, DirectEngine, Engine
from hf_parallel.engine.gradients import GradientSync
from hf_parallel.engine.pipeline import PipelineEngine
from hf_parallel.engine.plans import Plans, Substitute, agree, holding_of, make_plans, summary
from hf_parallel.engine.self_check import check_plans
from hf_parallel.errors import PlanError, RankMismatchError
from hf_parallel.guards.start import Start, begin_alike, refuse_unlike_parts
from hf_parallel.ledger import Ledger
from hf_parallel.mesh import Mesh, ranks_per_node
from hf_parallel.model.meta import off_meta
from hf_parallel.model.probes import Probes
from hf_parallel.model.stack import blocks_of
from hf_parallel.model.support import refuse_model
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind
from hf_parallel.pipeline_parallel.run.messages import Probe
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.run.transport import make_transport
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients
from hf_parallel.pipeline_parallel.schedule.programs import Programs, ScheduleChoice
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span, spans_of
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import ZeroConfig
from hf_parallel.tensor_parallel.plan.plan_for import Blueprint, blueprint_of, plan_for, small_twin
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.sequence import SequenceMode, install_blocks
from hf_parallel.tensor_parallel.shard_plan import TPPlan
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)

WASTE_WORTH_A_WARNING = 2 * 10**9  # bytes


def parallelize(
    model: nn.Module,
    config: HFParallelConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    watchdog: Watchdog,
    sample: Mapping[str, Any] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Engine:
    """Turn a whole model into this rank's part of it; collective.

    Args:
        model: A causal language model, whole, the same on every rank.
        config: The validated settings.
        mesh: This rank's mesh.
        device: Where the model is.
        watchdog: For waits.
        sample: A small batch of the kind the model will be trained on; None for made-up text.
        compute_dtype: What forward passes are autocast to; None without autocast.

    Returns:
        The engine, installed as `model.forward`.

    Raises:
        PlanError, ConfigError, UnsupportedError: The model cannot be parallelized as asked; nothing was changed.
        RankMismatchError: Ranks made different plans; nothing was changed.
    """
    refuse_model(model, mesh.shape.mp_size, shares_parameters=config.zero.shards_parameters)
    watchdog.runs("plans the stages and shards")
    probes = Probes(model, device, sample) if _needs_probes(config) else None
    unread = unread_of(model)
    blueprint = None
    if unread is not None:
        unread.check(config)
        unread.begin(model)
        blueprint = _blueprint(model, config, mesh.rank)
        if blueprint is None:
            unread.fill(model, None, mesh, device)
    start = _begin_alike(model, mesh, watchdog)
    with nullcontext() if blueprint is None else off_meta(model, device):
        plans = make_plans(
            model, config, mesh, probes, watchdog, None if blueprint is None else _substitute(blueprint)
        )
    with watchdog.waiting("waits for the plans of the other ranks"):
        agree(plans, mesh)
    if not start.have_same_tensors:
        raise RankMismatchError(
            f"the ranks have the same parameters of {type(model).__name__} but other buffers (names, shapes or dtypes). "
            "Build the model alike on every rank."
        )
    if unread is None:
        _warn_of_waste(model, plans, mesh)
    if blueprint is None and probes is not None:
        placement = plans.schedule.stages_of_ranks if plans.schedule is not None else ()
        parts = (plans.stages, plans.bounds, placement, plans.tensor_parallel)
        check_plans(model, config, *parts, probes=probes, watchdog=watchdog)
    pieces = transform(model, plans, mesh, config.pipeline.compile_blocks)
    if unread is not None and blueprint is not None:
        watchdog.runs("reads its weights")
        unread.fill(model, plans.ledger, mesh, device)
        _refuse_unlike_files(model, plans.ledger, mesh, watchdog)
    sharded = share_out(model, plans.units, config.zero, mesh, device, compute_dtype)
    engine = attach(model, pieces, plans, config, mesh, device=device, watchdog=watchdog, sharded=sharded)
    watchdog.runs()
    if mesh.rank == 0:
        for line in [*summary(plans), *engine.gradients.replicas.describe()]:
            logger.warning("hf_parallel: %s", line)
    return engine


def _begin_alike(model: nn.Module, mesh: Mesh, watchdog: Watchdog) -> Start:
    """Give every rank the weights of rank 0, before a part of them is made this rank's; collective."""
    watchdog.runs("compares its weights with those of rank 0")
    with watchdog.waiting("waits for the other ranks to compare the weights they begin with"):
        start = begin_alike(model)
    watchdog.runs("plans the stages and shards")
    for line in start.describe() if mesh.rank == 0 else ():
        logger.warning("hf_parallel: %s", line)
    return start


def _refuse_unlike_files(model: nn.Module, ledger: Ledger, mesh: Mesh, watchdog: Watchdog) -> None:
    """Refuse weights that ranks have read from files that differ; collective."""
    parameters, buffers = held_tensors(model, ledger, mesh.pp_rank)
    held: dict[str, torch.Tensor] = {**parameters, **buffers}
    shared = {
        "the replicas": (mesh.dp_group, list(held)),
        "the tensor-parallel ranks": (mesh.tp_group, [name for name in held if ledger.entries[name].spec is None]),
        "the stages that share it": (mesh.pp_group, [entry.name for entry in ledger if len(entry.holders) > 1]),
    }
    with watchdog.waiting("waits for the other ranks to compare what they read"):
        refuse_unlike_parts(held, shared, "the checkpoint that the weights were read from")


def _blueprint(model: nn.Module, config: HFParallelConfig, rank: int) -> Blueprint | None:
    """What stands for a model whose weights are read after the cut; None, with a warning, if they must be read before."""
    reason = None
    if config.pp_size > 1 and config.pipeline.costs == "measured":
        reason = "pipeline.costs is measured. Set it to analytic."
    checks = [("pipeline", config.pp_size, config.pipeline.self_check)]
    checks += [("tensor_parallel", config.tp_size, config.tensor_parallel.self_check)]
    for name, size, wish in checks:
        if size > 1 and wish == "on":
            reason = f"{name}.self_check is on. Set it to auto or off."
    blueprint = None
    if reason is None:
        try:
            blueprint = blueprint_of(model)
        except PlanError as error:
            reason = str(error)
    if rank == 0 and reason is not None:
        logger.warning("hf_parallel: every rank reads the whole model before it is cut: %s", reason)
    elif rank == 0 and any(size > 1 and wish == "auto" for _, size, wish in checks):
        logger.warning("hf_parallel: self_check=auto: skipped, the weights are read after the cut.")
    return blueprint


def _substitute(blueprint: Blueprint) -> Substitute:
    def plan(tp_size: int, sample: Mapping[str, Any], **settings: Any) -> TPPlan:
        here = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in sample.items()}
        return plan_for(blueprint, tp_size, sample=here, **settings)

    return Substitute(plan, partial(small_twin, blueprint))


def _warn_of_waste(model: nn.Module, plans: Plans, mesh: Mesh) -> None:
    """Say what this rank held of a model loaded whole."""
    held = sum(p.nbytes for p in model.parameters())
    spare = held - holding_of(model, plans.ledger, mesh.pp_rank, mesh.shape.tp_size).weights
    if mesh.rank == 0 and spare > WASTE_WORTH_A_WARNING:
        logger.warning(
            "hf_parallel: each rank loaded the whole model (%.1f GB), this one %.1f GB for nothing. Load it with "
            "hf_parallel.from_pretrained(...), or inside `with hf_parallel.sharded_loading():`.",
            held / 1e9,
            spare / 1e9,
        )


def _needs_probes(config: HFParallelConfig) -> bool:
    """Whether anything has to be found out by running the model."""
    recomputes = config.activation_checkpointing.every is not None
    return config.model_parallel_size > 1 or recomputes or config.zero.shards_parameters


@dataclass(frozen=True)
class Pieces:
    """What `transform` leaves of a model on a rank of several.

    Args:
        stages: Stage index -> stage.
        weights: What puts off weight gradients, for a schedule that splits backwards.
    """

    stages: Mapping[int, Stage]
    weights: WeightGradients | None


def transform(
    model: nn.Module, plans: Plans, mesh: Mesh, compile_blocks: Literal["none", "inductor", "aot_eager"] = "none"
) -> Pieces | None:
    """Call 4: cut to this rank's stages, then shard what they hold. In place; Parameter identity survives.

    Args:
        model: The whole model.
        plans: What was found out about it.
        mesh: This rank's mesh.
        compile_blocks: Backend of torch.compile for the blocks of this rank.

    Returns:
        The stages of this rank; None with pp_size 1.
    """
    pieces, spans = None, None
    if plans.stages is not None and plans.schedule is not None:
        mine = plans.schedule.stages_of_ranks[mesh.pp_rank]
        spans = [spans_of(plans.bounds)[stage] for stage in mine]
        if compile_blocks != "none":
            _compile(model, plans.stages, spans, compile_blocks)
        sequence = _share_sequence(model, plans, mesh, spans)
        stages = cut_stages(model, plans.stages, plans.bounds, mine, plans.forward)
        # Before sharding: it knows plain layers only, and a sharded layer takes over what it finds.
        pieces = Pieces(stages, WeightGradients(model) if plans.schedule.splits_backward else None)
    else:
        sequence = _share_sequence(model, plans, mesh, None)
    stack, groups = plans.recomputed
    if groups:
        held = [group for group in groups if spans is None or any(s.lo <= group.start < s.hi for s in spans)]
        how = plans.recompute
        follow: Follow = sequence.follow if sequence is not None else lambda tensor: None
        recompute_blocks(model, stack, held, offload=how.offload, products=how.products, follow=follow)
    if plans.tensor_parallel is not None and mesh.tp_group is not None:
        apply_tensor_parallel(
            model,
            plans.tensor_parallel,
            mesh.tp_group,
            mesh.tp_rank,
            holds=lambda name: plans.ledger.holds(mesh.pp_rank, name),
            deferral=None if pieces is None else pieces.weights,
            reduces_in_fp32=plans.reduces_in_fp32,
        )
    return pieces


def _share_sequence(model: nn.Module, plans: Plans, mesh: Mesh, spans: Sequence[Span] | None) -> SequenceMode | None:
    """Before stages and recomputation are put over the blocks: whole hidden states enter and leave each stage."""
    sequence = plans.tensor_parallel.sequence if plans.tensor_parallel is not None else None
    if sequence is None or mesh.tp_group is None:
        return None
    if plans.stages is not None and plans.stages.stack != sequence.stack:
        raise PlanError(
            f"tensor_parallel.sequence_parallel: true: the sharded layers are in {sequence.stack}, the pipeline cuts "
            f"{plans.stages.stack}. Set one of sequence_parallel: false and pp_size: 1."
        )
    sections = None if spans is None else [range(span.lo, span.hi) for span in spans]
    return install_blocks(model, sequence, mesh.tp_group, sections)


def share_out(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    zero: ZeroConfig,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype | None,
) -> ShardedModel | None:
    """Share parameters out over the replicas, if the settings ask for it; the model gets new Parameter objects."""
    if not zero.shards_parameters or mesh.dp_shard_group is None:
        return None
    return ShardedModel(
        model,
        units,
        mesh.dp_shard_group,
        mesh.dp_replicate_group,
        stage=zero.stage,
        device=device,
        offload="none" if zero.offload_param == "none" else "pinned" if pins(zero, device) else "pageable",
        compute_dtype=compute_dtype,
    )


def _compile(model: nn.Module, plan: PipelinePlan, spans: Sequence[Span], backend: str) -> None:
    """Compile each block by itself: a stage ends by an exception, which breaks a graph of the whole stage."""
    for index, block in enumerate(blocks_of(model, plan.stack)):
        if any(span.lo <= index < span.hi for span in spans):
            block.forward = torch.compile(block.forward, backend=backend)


def attach(
    model: nn.Module,
    pieces: Pieces | None,
    plans: Plans,
    config: HFParallelConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    watchdog: Watchdog,
    sharded: ShardedModel | None = None,
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
        gradients=GradientSync(
            plans.ledger,
            parameters,
            mesh,
            ReplicaSettings(
                config.data_parallel,
                config.zero,
                config.gradient_compression,
                config.local_sgd,
                ranks_per_node=ranks_per_node(),
                overlaps=pieces is None or pieces.weights is None,
                waiting=watchdog.waiting,
                sharded=sharded,
            ),
        ),
        batch_check=BatchCheck(mesh, config.monitor.batch_check_steps),
        random_check=RandomCheck(mesh, device, config.monitor.batch_check_steps),
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
    return PipelineEngine(
        attachment,
        runtime,
        programs=Programs(schedule, mesh.pp_rank),
        num_microbatches=schedule.num_microbatches,
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
