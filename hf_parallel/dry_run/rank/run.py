"""The dry run of one rank: the real plan, cut, shard, schedule, backward, reduction and optimizer on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hf_parallel.batches import split_rows
from hf_parallel.compat.fake_cuda import fake_cuda, fake_products
from hf_parallel.compat.fake_ranks import fake_ranks
from hf_parallel.compat.private_transformers import own_attention_names
from hf_parallel.compat.torch_tools import FakeTensorMode
from hf_parallel.data_parallel import flat
from hf_parallel.dry_run.rank.model import FOREVER_S, Planned, build, plan_alone
from hf_parallel.dry_run.rank.parts import refuse_parts
from hf_parallel.dry_run.rank.report import DryRun, report_of
from hf_parallel.dry_run.rank.routing import EvenJourney
from hf_parallel.dry_run.rank.step import Training, batches_of
from hf_parallel.engine.attach import attach
from hf_parallel.engine.parallelize import take_part
from hf_parallel.engine.plan.plans import Plans, on_shared_rows
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.plan.share_rows import share_rows
from hf_parallel.engine.transform import shard_over_replicas
from hf_parallel.errors import ParallelError
from hf_parallel.expert_parallel import exchange
from hf_parallel.guards.weights import buffers
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.memory.fakes import give_memory, maskless_attention
from hf_parallel.memory.meter import Meter
from hf_parallel.memory.terms import Precision, Work
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.support import refuse_model
from hf_parallel.pipeline_parallel.run.messages import Receiver
from hf_parallel.pipeline_parallel.run.stage import cut_stages
from hf_parallel.pipeline_parallel.run.transport import TensorSpec
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)

RUN = 2  # batches of a step without a pipeline: each one more does what the last one did


@dataclass(frozen=True)
class Job:
    """A rank's training that is run dry.

    Args:
        config: Validated settings.
        model: A transformers config.
        work: Rows, tokens and batches of a step of one model copy.
        rank: Rank in the world.
        world_size: Ranks of the world.
        ranks_per_node: Ranks of the world on each machine.
        on_gpu: Whether ranks have GPUs and NCCL; else CPU and gloo.
        precision: Precision of the parameters.
        compute: Autocast dtype of forward passes; None without autocast.
        mask: Whether batches come with an attention mask.
        lora_rank: Rank of LoRA on the linear layers of the model, which is frozen then; 0 trains the model.
    """

    config: HFParallelConfig
    model: Any
    work: Work
    rank: int
    world_size: int
    ranks_per_node: int
    on_gpu: bool = True
    precision: Precision = "fp32"
    compute: torch.dtype | None = None
    mask: bool = False
    lora_rank: int = 0

    @property
    def shape(self) -> MeshShape:
        """Shape of the mesh."""
        config, inside = self.config, self.config.topology.dp_inside
        sizes = config.dp_size(self.world_size), config.pp_size, config.tp_size, config.sp_size
        ep_size = config.ep_size if self.world_size > 1 else 1
        return MeshShape(*sizes, ep_size=ep_size, dp_inside=1 if inside == "auto" else inside)

    @property
    def device(self) -> torch.device:
        """Device of the rank."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


def run_dry(job: Job) -> DryRun:
    """Train two steps of one rank on fake tensors and count the second, and memory of the first if that needs more.

    Raises:
        PlanError, ConfigError, UnsupportedError: The same as in a run with these settings.
    """
    if job.config.sp_size > 1:
        logger.warning(
            "hf_parallel: sp_size=%d: a run compares the model on parts of each row with the whole one when it starts, and refuses one "
            "that differs; a dry run has no values to compare.",
            job.config.sp_size,
        )
    job = replace(job, config=_steady(job.config))
    dtype = torch.float32
    if job.precision == "half":
        dtype = job.compute or torch.bfloat16
    model = build(job.model, dtype, job.lora_rank)
    try:
        return _run(job, model)
    except ParallelError:
        raise
    except Exception as error:
        if job.config.sp_size > 1:
            refuse_parts(job, model, error, run_dry)
        raise


def _run(job: Job, model: nn.Module) -> DryRun:
    schedule = ScheduleChoice(job.config.pipeline, job.config.pp_size)
    shares = job.config.zero.shards_parameters
    refuse_model(model, job.shape.mp_size, tp_size=job.shape.tp_size, shares_parameters=shares)
    planned = plan_alone(model, job.model, job.config, schedule, job.shape)
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # first: it imports what must find torch.cuda as it is
    meter = Meter(job.device.type, functools.partial(axis_of, job.shape), fake)
    meter.name(model)
    with _world(job, meter):
        setup = _setup(job, planned)
        payloads = _Payloads(job, planned, setup, fake) if planned.plans.cut is not None else None
        training, count = _prepare(job, setup, planned.plans, meter, fake)
        work = replace(job.work, accumulation=min(job.work.accumulation, RUN)) if payloads is None else job.work
        batches = batches_of(work, mask=job.mask, new=functools.partial(_new, fake, meter, job.device))
        with contextlib.ExitStack() as stack:
            if payloads is not None:
                stack.enter_context(mock.patch.object(Receiver, "_receive_header", payloads.header_of))
            if not job.mask:
                stack.enter_context(maskless_attention(model))
            stack.enter_context(meter)
            meter.begin()
            training.step(batches[:1])  # makes the optimizer's state
            alone, first = meter.counts(), meter.memory.peak()
            meter.begin()
            training.step(batches)
            # Without ZeRO both need the same. With stage 3 torch works out shapes in the first one, on fake tensors of whole parameters.
            if job.config.zero.stage not in (1, 2):
                first = meter.memory.peak()
            if len(batches) < job.work.accumulation:
                meter.repeat(alone, job.work.accumulation - len(batches))
        return report_of(job.shape.describe(job.rank), meter, count, first)


def axis_of(shape: MeshShape, ranks: list[int]) -> str:
    """Name the axes along which a group of world ranks lies: "tp", "dp+pp" and so on."""
    coordinates = zip(*map(shape.coordinates, ranks), strict=True)
    return "+".join(name for name, one in zip(("dp", "pp", "tp", "sp"), coordinates, strict=True) if len(set(one)) > 1)


def _steady(config: HFParallelConfig) -> HFParallelConfig:
    """The settings of a step in the middle of a run: what only its first steps compare is left out."""
    section = config.to_yaml_section()
    section.setdefault("monitor", {})["batch_check_steps"] = 0
    pipeline = section.setdefault("pipeline", {})
    if config.pipeline.costs == "measured":
        logger.warning("hf_parallel: pipeline.costs=measured: a dry run computes nothing, so the cut is by formula.")
        pipeline["costs"] = "analytic"
    for name in ("rank_speed", "rank_memory_gb"):
        if getattr(config.pipeline, name) == "auto":
            logger.warning(
                "hf_parallel: pipeline.%s=auto: a dry run measures nothing; give a list to see its cut.", name
            )
            pipeline[name] = None
    if config.pipeline.compile_blocks != "none":
        logger.warning("hf_parallel: pipeline.compile_blocks: a dry run compiles nothing and counts eager blocks.")
        pipeline["compile_blocks"] = "none"
    return HFParallelConfig.from_mapping(section, source="dry run")


@contextlib.contextmanager
def _world(job: Job, meter: Meter) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if job.on_gpu:
            stack.enter_context(fake_cuda(meter.waited))
        else:
            stack.enter_context(fake_products())
        backend = "nccl" if job.on_gpu else "gloo"
        stack.enter_context(fake_ranks(job.rank, job.world_size, job.ranks_per_node, backend))
        stack.enter_context(meter.following_resizes())
        stack.enter_context(own_attention_names())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor")  # all are 0
        stack.enter_context(mock.patch.object(buffers, "LOOKS", 0))  # of the first passes of a run
        stack.enter_context(mock.patch.object(flat, "place_in", _view_of))
        stack.enter_context(mock.patch.object(exchange, "Journey", EvenJourney))
        yield


def _setup(job: Job, planned: Planned) -> Setup:
    """The planned model on this rank, with groups of ranks that do not exist."""
    config, shard_size = job.config, job.config.zero.dp_shard_size
    mesh = Mesh.build(
        job.shape,
        timeout=timedelta(seconds=60),
        dp_shard_size=None if shard_size == "auto" or job.world_size == 1 else shard_size,
        # Sums inside nodes are a thread's work on the CPU, which a meter does not follow.
        links=config.topology.links(job.world_size, job.ranks_per_node) if job.on_gpu else None,
    )
    names = [job.shape.describe(rank) for rank in range(job.world_size)]
    watchdog = Watchdog(None, job.rank, names, FOREVER_S)
    return Setup(planned.model, config, planned.setup.schedule, mesh, job.device, watchdog)


def _prepare(job: Job, setup: Setup, plans: Plans, meter: Meter, fake: FakeTensorMode) -> tuple[Training, int]:
    """Make the planned model this rank's, as `parallelize` does; its training, and how many parameters it holds."""
    model = setup.model
    plans = on_shared_rows(setup, plans)
    stages = take_part(setup, plans)
    give_memory(model, job.device, fake, meter.follow)
    count = sum(parameter.numel() for parameter in model.parameters())
    with meter:
        meter.phase = "weights"
        replicas = shard_over_replicas(setup, plans.units, job.compute)
        engine = attach(setup, plans, stages, replicas)
        engine.autocast = autocast_of(job)
        return Training.of(engine, meter), count


def autocast_of(job: Job) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The context that forward passes run in."""
    if job.compute is None:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, job.device.type, dtype=job.compute)


def _view_of(whole: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """Do what `flat.place_in` does, for a tensor without memory."""
    return whole[offset : offset + math.prod(shape)].view(tuple(shape))


def _new(
    fake: FakeTensorMode, meter: Meter, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor of a batch; on the host with values, which ranks compare."""
    if device.type == "cpu":
        return torch.ones(shape, dtype=dtype)
    with fake:
        made = torch.empty(shape, dtype=dtype, device=device)
    meter.follow(made, "batch")
    return made


class _Payloads:
    """The payloads that earlier stages send to a rank, found by running all stages before its own."""

    def __init__(self, job: Job, planned: Planned, setup: Setup, fake: FakeTensorMode) -> None:
        self._job, self._planned, self._setup, self._fake = job, planned, setup, fake
        self._found: dict[tuple[int, int], tuple[TensorSpec, ...]] = {}
        self._rows = self._rows_of_microbatches()
        self._untouched = copy.deepcopy(planned.model)
        self._find()

    def header_of(self, message: Any) -> tuple[TensorSpec, ...]:
        """Shapes of the payload of an action of another rank."""
        return self._found[message.stage, self._rows[message.microbatch % len(self._rows)]]

    def _find(self) -> None:
        """Run what comes before each stage of this rank."""
        cut, pp_rank = self._planned.plans.cut, self._job.shape.coordinates(self._job.rank)[1]
        for stage in cut.schedule.stages_of_ranks[pp_rank] if cut is not None else ():
            if cut is not None and stage and cut.schedule.placement[stage - 1] != pp_rank:
                self._found |= {(stage - 1, rows): self._run(stage - 1, rows) for rows in set(self._rows)}

    def _rows_of_microbatches(self) -> list[int]:
        work, cut = self._job.work, self._planned.plans.cut
        parts = 1 if cut is None or cut.loss_kind == "whole" else cut.schedule.num_microbatches
        batch = {"input_ids": torch.empty(work.rows, 1, device="meta")}
        return [len(part["input_ids"]) for part in split_rows(batch, min(parts, work.rows))]

    def _run(self, stage: int, rows: int) -> tuple[TensorSpec, ...]:
        """Run stages 0 to `stage` as one, without metering."""
        job, cut = self._job, self._planned.plans.cut
        if cut is None:
            raise LookupError(stage)
        model: nn.Module = copy.deepcopy(self._untouched)
        bounds = [0, cut.bounds[stage + 1], cut.bounds[-1]]
        setup = replace(self._setup, model=model)
        plans = on_shared_rows(setup, replace(self._planned.plans, forward=model.forward))
        before = cut_stages(model, cut.stages, bounds, [0], plans.forward)[0]
        share_rows(setup, plans.rows)
        give_memory(model, job.device, self._fake)
        batch = batches_of(
            replace(job.work, rows=rows, accumulation=1),
            mask=job.mask,
            new=functools.partial(_new, self._fake, Meter("none", str), job.device),
        )[0]
        with Meter("none", str, self._fake), autocast_of(job)():
            payload = before(**batch, use_cache=False)
        return tuple(TensorSpec.of(tensor) for tensor in payload)
