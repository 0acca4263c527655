"""The last step: groups, gradient reduction and an engine around what this rank holds of a model."""

from __future__ import annotations

from torch import nn

from hf_parallel.batches import BatchCheck, RandomCheck
from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.data_parallel.replica_wire import ReplicaSettings
from hf_parallel.engine.generation import install_generate
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.engine.plan.held import held_tensors, places_of
from hf_parallel.engine.plan.plans import Plans
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.plan.stages import Cut
from hf_parallel.engine.run.direct import DirectEngine
from hf_parallel.engine.run.engine import Attachment, Engine
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.engine.transform import Stages
from hf_parallel.guards.calls.part_hooks import PartHooks
from hf_parallel.pipeline_parallel.run.links import neighbour_pairs
from hf_parallel.pipeline_parallel.run.messages import Probe
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.transport import make_transport
from hf_parallel.pipeline_parallel.schedule.programs import Programs
from hf_parallel.tensor_parallel.run.apply import seen_in_parts
from hf_parallel.tensor_parallel.shard_plan import TPPlan


def attach(setup: Setup, plans: Plans, stages: Stages | None, sharded: ShardedModel | None) -> Engine:
    """Make the engine and install it as `model.forward`; the model trains from here on.

    Args:
        setup: The model, cut and sharded.
        plans: Plans for the model.
        stages: The stages of this rank; None with pp_size 1.
        sharded: The parameters that replicas share out; None if each has them all.
    """
    parameters, buffers = held_tensors(setup.model, plans.ledger, setup.mesh.pp_rank)
    replicas = _replica_settings(setup, sharded, overlaps=stages is None or stages.weights is None)
    check_steps = setup.config.monitor.batch_check_steps
    attachment = Attachment(
        model=setup.model,
        forward=plans.forward,
        device=setup.device,
        mesh=setup.mesh,
        ledger=plans.ledger,
        parameters=parameters,
        places=places_of(setup.model, buffers),
        gradients=GradientSync(plans.ledger, parameters, setup.mesh, replicas),
        batch_check=BatchCheck(setup.mesh, check_steps),
        random_check=RandomCheck(setup.mesh, setup.device, check_steps),
        watchdog=setup.watchdog,
        recorder=setup.recorder,
    )
    if stages is None or plans.cut is None:
        engine: Engine = DirectEngine(attachment)
    else:
        engine = _pipeline_engine(attachment, stages, plans.cut)
    if setup.mesh.shape.sp_size > 1:  # around the model itself rows are whole
        inside = dict.fromkeys((name for name, _ in setup.model.named_modules() if name), "part of the tokens")
        engine.part_hooks = PartHooks(setup.model, inside, axis="sp_size", is_part=lambda tensor: True)
    elif plans.tensor_parallel is not None and setup.mesh.tp_group is not None:
        engine.part_hooks = _part_hooks(setup.model, plans.tensor_parallel)
    engine.install()
    install_generate(engine)
    return engine


def _part_hooks(model: nn.Module, plan: TPPlan) -> PartHooks:
    given = {name for name, linear in plan.linears.items() if linear.role in ("column", "vocab_head") and linear.entry}
    tuners = tuner_layers(model)  # what a row with an adapter leaves is summed in the layer around it

    def outer(name: str) -> str:
        around = name.removesuffix(".base_layer")
        return around if around in tuners else name

    given |= {outer(name) for name in given}
    returned = {outer(pair.row) for pair in plan.pairs}
    is_part = None
    if plan.sequence is not None:  # then only the head's are whole
        given, returned = (
            {name for name in given if name in plan.linears and plan.linears[name].role == "vocab_head"},
            set(),
        )
        is_part = vars(model)["tp_sequence"].has_part
    return PartHooks(model, seen_in_parts(model, plan), given, returned, is_part=is_part)


def _replica_settings(setup: Setup, sharded: ShardedModel | None, *, overlaps: bool) -> ReplicaSettings:
    config = setup.config
    return ReplicaSettings(
        config.data_parallel,
        config.zero,
        config.gradient_compression,
        config.local_sgd,
        reduction=config.topology.reduction,
        overlaps=overlaps,
        waiting=setup.watchdog.waiting,
        sharded=sharded,
        recorder=setup.recorder,
    )


def _pipeline_engine(attachment: Attachment, stages: Stages, cut: Cut) -> PipelineEngine:
    mesh, watchdog, schedule = attachment.mesh, attachment.watchdog, cut.schedule
    kind, device = schedule.settings.transport, attachment.device
    backend = "gloo" if kind == "host" and device.type != "cpu" else None
    awaited = [
        (mesh.shape.rank_at(mesh.dp_rank, pp_rank, mesh.tp_rank, mesh.sp_rank),)
        for pp_rank in range(mesh.shape.pp_size)
    ]
    groups = mesh.channel_groups(neighbour_pairs(schedule.placement), backend)
    runtime = PipelineRuntime(
        stages.by_index,
        schedule.placement,
        mesh.pp_rank,
        {pair: make_transport(kind, device, group) for pair, group in groups.items()},
        probe=Probe(
            waits=lambda text, peer: watchdog.waits(text, awaited[peer]),
            runs=watchdog.runs,
            recorder=attachment.recorder,
        ),
        weights=stages.weights,
    )
    return PipelineEngine(
        attachment,
        runtime,
        programs=Programs(schedule, mesh.pp_rank),
        num_microbatches=schedule.num_microbatches,
        loss_kind=cut.loss_kind,
        backward_kind=cut.backward_kind,
        schedule=schedule.settings.schedule,
        vertical_sync=schedule.settings.vertical_sync,
    )
