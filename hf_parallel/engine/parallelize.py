"""One model, one config, one rank: where the techniques meet, in the order in which they are applied.

Plans are made on the whole model and compared over the ranks before anything is changed. Then the model is changed in
place: cut into pipeline stages, its blocks checkpointed, its layers sharded, its parameters shared out over replicas.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_parallel.compat.private_quantised import keep_trainable
from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.engine.attach import attach
from hf_parallel.engine.opening import for_inference, holdings_of, opening
from hf_parallel.engine.plan.plans import Plans, agree, make_plans, summary
from hf_parallel.engine.plan.self_check import check_plans
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.plan.share_rows import check_rows, see_whole_rows, share_rows
from hf_parallel.engine.plan.verdicts import Verdicts, verdicts_of
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.expected import expected
from hf_parallel.engine.transform import (
    Stages,
    checkpoint_activations,
    compile_blocks,
    cut_into_stages,
    defer_head,
    shard_layers,
    shard_over_replicas,
    shard_sequence,
    spread_experts,
)
from hf_parallel.engine.weights import LateWeights, begin_alike_on_all, prepare_late_weights, warn_of_waste
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.weights.start import Start
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.logs import told_if_slow
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.probes import Probes
from hf_parallel.model.support import refuse_model
from hf_parallel.monitor.recorder import Recorder
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)
IN_PARTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of which this rank has parts


def parallelize(
    model: nn.Module,
    config: HFParallelConfig,
    mesh: Mesh,
    *,
    schedule: ScheduleChoice,
    device: torch.device,
    watchdog: Watchdog,
    sample: Mapping[str, Any] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Engine:
    """Turn a whole model into this rank's part of it; collective.

    Args:
        model: A causal language model, whole, the same on every rank. One of which nothing is trained is planned as if all of
            it were.
        config: The validated settings.
        mesh: This rank's mesh.
        schedule: The pipeline schedule that the settings ask for.
        device: Device of the model.
        watchdog: For waits.
        sample: A small batch of the kind the model will be trained on; None for made-up text.
        compute_dtype: Autocast dtype of forward passes; None without autocast.

    Returns:
        The engine, installed as `model.forward`.

    Raises:
        PlanError, ConfigError, UnsupportedError: The model cannot be parallelized as asked; nothing was changed.
        RankMismatchError: Ranks made different plans; nothing was changed.
    """
    _refuse(model, config, mesh.shape)
    keep_trainable(model)
    watchdog.runs("plans the stages and shards")
    started = time.monotonic()
    probes = Probes(model, device, sample) if needs_probes(config) else None
    verdicts = Verdicts()
    if probes is not None and config.remembers_verdicts:
        verdicts = verdicts_of(model, config, mesh.shape, device, probes.batch)
    recorder = Recorder(device, on=config.monitor.records)
    setup = Setup(model, config, schedule, mesh, device, watchdog, verdicts, recorder)

    late = prepare_late_weights(setup)
    start = begin_alike_on_all(setup)
    with as_if_trained(model) as trains:
        plans = _agreed_plans(setup, probes, late, start)
        compared = _check(setup, plans, probes, late)
    holdings, seconds = holdings_of(plans, setup), time.monotonic() - started

    stages, sharded = _transform(setup, plans, late, compute_dtype)
    engine = attach(setup, plans, stages, sharded)
    if config.keeps_parts:
        IN_PARTS.add(model)
    engine.expected = expected(holdings, plans.prediction, plans.recomputed)
    watchdog.runs()
    if setup.reports:
        if trains:
            of_replicas = engine.gradients.replicas.describe()
            lines = opening(plans, setup, holdings, of_replicas, seconds, compared=compared)
        else:
            lines = [for_inference(plans, setup, holdings, seconds, compared=compared)]
        _log(lines, summary(plans, setup))
    return engine


def _transform(
    setup: Setup, plans: Plans, late: LateWeights, compute_dtype: torch.dtype | None
) -> tuple[Stages | None, ShardedModel | None]:
    """Change the model in place into this rank's part of it; gives its stages, and its parameters if replicas share them out."""
    stages = take_part(setup, plans)
    with told_if_slow(partial(_tell, setup, "reads the weights")):
        late.read(plans.ledger)
    return stages, shard_over_replicas(setup, plans.units, compute_dtype)


def take_part(setup: Setup, plans: Plans) -> Stages | None:
    """Change the model in place into this rank's part of it, but for what replicas share out; gives its stages.

    Blocks are compiled before anything is put around them. The sequence is sharded within stages: whole hidden states enter
    and leave each. Layers are sharded last, since deferred weight gradients know plain layers only.

    Args:
        setup: The whole model, and this rank's mesh.
        plans: The plans for it.
    """
    see_whole_rows(setup, plans.rows)
    compile_blocks(setup, plans)
    sequence = shard_sequence(setup, plans)
    stages = cut_into_stages(setup, plans)
    checkpoint_activations(setup, plans, sequence)
    shard_layers(setup, plans, stages)
    spread_experts(setup, plans)
    defer_head(setup, plans)
    share_rows(setup, plans.rows)
    return stages


def _refuse(model: nn.Module, config: HFParallelConfig, shape: MeshShape) -> None:
    _refuse_again(model)
    refuse_model(
        model,
        shape.mp_size,
        tp_size=shape.tp_size,
        sp_size=shape.sp_size,
        shares_parameters=config.zero.shards_parameters,
        num_copies=shape.num_copies,
    )


def _agreed_plans(setup: Setup, probes: Probes | None, late: LateWeights, start: Start) -> Plans:
    """Plan stages and shards, and compare the plans over the ranks."""
    with late.computable(), told_if_slow(partial(_tell, setup, "plans stages and shards")):
        plans = make_plans(setup, probes, late.stand_in)
    agree(plans, setup, start)
    if late.is_empty:
        warn_of_waste(setup, plans.ledger)
    return plans


def _check(setup: Setup, plans: Plans, probes: Probes | None, late: LateWeights) -> bool:
    """Compare the planned parts with the whole model; whether anything was to compare."""
    with late.computable(), told_if_slow(partial(_tell, setup, "compares the planned parts with the whole model")):
        compared = probes is not None and check_plans(setup, plans, probes, has_values=late.stand_in is None)
        check_rows(setup, plans.rows, probes)
    return compared


def _log(opening_lines: Iterable[str], details: Iterable[str]) -> None:
    for line in opening_lines:
        logger.info("hf_parallel: %s", line)
    for line in details:
        logger.debug("hf_parallel: %s", line)


@contextmanager
def as_if_trained(model: nn.Module) -> Iterator[bool]:
    """Inside, a model of which nothing is trained has gradients, so that they are compared too; gives whether something is."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    trains = any(parameter.requires_grad for parameter in parameters)
    for parameter in () if trains else parameters:
        parameter.requires_grad_(True)
    try:
        yield trains
    finally:
        for parameter in () if trains else parameters:
            parameter.requires_grad_(False)


def _refuse_again(model: nn.Module) -> None:
    if model in IN_PARTS:
        raise UnsupportedError(
            f"this {type(model).__name__} is parallelized already, by another Trainer or Accelerator of this process, and each rank "
            "has its parts of it. Train it on with that one (change trainer.args and call trainer.train() again), or save it with "
            "trainer.save_model() and load that folder for the new one."
        )


def _tell(setup: Setup, doing: str) -> None:
    if setup.reports:
        logger.info("hf_parallel: %s ...", doing)


def needs_probes(config: HFParallelConfig) -> bool:
    """Whether anything has to be found out by running the model."""
    return (
        config.tp_size * config.sp_size * config.ep_size > 1 or config.works_on_blocks or config.zero.shards_parameters
    )
