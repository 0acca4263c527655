"""Where the strategies meet: one model, one config, five visible calls.

`plan_tensor_parallel`, `discover_stages` and `build_ledger` read the whole model and change nothing; `transform` cuts it
to this rank's stage and shards what is left, in place; `attach` puts the engine in. Plans are compared across ranks
before anything is changed.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.batches import BatchCheck
from hf_parallel.config import HFParallelConfig, PipelineConfig
from hf_parallel.engine import Attachment, DirectEngine, Engine
from hf_parallel.errors import PlanError, RankMismatchError, UnsupportedError
from hf_parallel.gradients import GradientSync
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.mesh import Mesh
from hf_parallel.pipeline_engine import PipelineEngine
from hf_parallel.pipeline_parallel.discover import PipelinePlan, discover_stages
from hf_parallel.pipeline_parallel.messages import Probe
from hf_parallel.pipeline_parallel.partition import block_costs, partition
from hf_parallel.pipeline_parallel.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.schedules import SCHEDULES
from hf_parallel.pipeline_parallel.selfcheck import check_split, loss_normalisation, tiny_samples
from hf_parallel.pipeline_parallel.stage import Stage
from hf_parallel.pipeline_parallel.transport import make_transport
from hf_parallel.tensor_parallel.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.check import verify_model
from hf_parallel.tensor_parallel.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan import TPPlan
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)

# `self_check: auto` copies the model once a stage on one rank; above this share of free memory it is skipped, loudly.
SELF_CHECK_MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class Plans:
    """What the pure calls found out, equal on every rank.

    Args:
        forward: The genuine forward of the model, as it is when it is parallelized.
        tensor_parallel: Roles and shard layouts, None with tp_size 1.
        stages: Crossings and readers, None with pp_size 1.
        bounds: Block boundaries of the stages, [0, ..., num_blocks]; [0, 1] with pp_size 1.
        ledger: The full model's parameters.
        loss_kind: Whether the model's own loss is a sum over `num_items_in_batch` or a mean over its batch.
    """

    forward: Callable[..., Any]
    tensor_parallel: TPPlan | None
    stages: PipelinePlan | None
    bounds: list[int]
    ledger: Ledger
    loss_kind: Literal["sum_over_items", "mean"]


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
        check_plans(model, config, mesh, plans)
    stage = transform(model, plans, mesh)
    engine = attach(model, stage, plans, config, mesh, device=device, watchdog=watchdog)
    watchdog.runs()
    if mesh.rank == 0:
        for line in summary(plans):
            logger.warning("hf_parallel: %s", line)
    return engine


def refuse_model(model: nn.Module, mp_size: int) -> None:
    """Refuse models that would train wrong or crash late.

    Raises:
        UnsupportedError: The model is dispatched, quantised, or wrapped in a way that cannot be cut or sharded.
    """
    name = type(model).__name__
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len(set(device_map.values())) > 1:
        raise UnsupportedError(
            f"{name} was loaded with device_map={sorted(set(map(str, device_map.values())))}: accelerate already "
            "spread it over devices. Load it without device_map; hf_parallel places the stages."
        )
    if getattr(model, "quantization_method", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedError(
            f"{name} has quantised weights ({getattr(model, 'quantization_method', 'unknown method')}): they cannot be "
            "sharded or trained here. Load it without quantization_config."
        )
    if mp_size > 1 and hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"{name} is a PEFT model: adapters with pp_size or tp_size above 1 are not available yet. Use pp_size 1 "
            "and tp_size 1 (data parallel), or train the full model."
        )


def probe_batch(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """A tiny batch, i[2 8], that every rank makes alike without touching the global random state.

    Raises:
        PlanError: The vocabulary is not known.
    """
    return tiny_samples(vocab_size(model), device=device, use_cache=False)[0]


def vocab_size(model: Any) -> int:
    """Size of the model's (text) vocabulary.

    Raises:
        PlanError: The config does not say.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise PlanError(f"{type(model).__name__}: config.vocab_size is {size!r}, so no probe batch can be made.")
    return size


def make_plans(model: nn.Module, config: HFParallelConfig, mesh: Mesh, device: torch.device) -> Plans:
    """Calls 1 to 3: pure, on the whole model.

    Raises:
        PlanError: No stage or shard plan fits, or `tensor_parallel.on_fallback: error` and a layer has none.
    """
    shape = mesh.shape
    if shape.mp_size == 1:
        ledger = build_ledger(model, num_stages=1, holds=lambda stage, name: True, specs={})
        return Plans(model.forward, None, None, [0, 1], ledger, "sum_over_items")
    sample = probe_batch(model, device)
    tensor_parallel = plan_tensor_parallel(model, shape.tp_size, sample) if shape.tp_size > 1 else None
    if tensor_parallel is not None:
        judge_fallbacks(tensor_parallel, config.tensor_parallel.on_fallback, mesh.rank)
    stages, bounds = None, [0, 1]
    loss_kind: Literal["sum_over_items", "mean"] = "sum_over_items"
    if shape.pp_size > 1:
        stages = discover_stages(model, sample)
        bounds = partition(stages.num_blocks, shape.pp_size, config.pipeline.split, block_costs(model, stages))
        for boundary in bounds[1:-1]:
            stages.crossings(boundary)  # raises for a cut that cannot be addressed
        loss_kind = loss_normalisation(model, sample)

    def holds(stage: int, name: str) -> bool:
        return stages is None or stages.holds(bounds[stage], bounds[stage + 1], name)

    specs = tensor_parallel.shard_specs() if tensor_parallel is not None else {}
    ledger = build_ledger(model, num_stages=shape.pp_size, holds=holds, specs=specs)
    return Plans(model.forward, tensor_parallel, stages, bounds, ledger, loss_kind)


def judge_fallbacks(plan: TPPlan, on_fallback: Literal["warn", "error", "ignore"], rank: int) -> None:
    """Report layers that are not column-row pairs: they cost an all-gather each, or are not sharded at all.

    Raises:
        PlanError: `on_fallback` is "error" and there are such layers.
    """
    if not plan.fallbacks or on_fallback == "ignore":
        return
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(plan.fallbacks.items())[:3])
    text = f"tensor_parallel: {len(plan.fallbacks)} layers are not column-row pairs ({shown})."
    if on_fallback == "error":
        raise PlanError(f"{text} Set tensor_parallel.on_fallback to warn, or choose a tp_size that divides the heads.")
    if rank == 0:
        logger.warning("hf_parallel: %s", text)


def summary(plans: Plans) -> list[str]:
    """Lines that say what each stage holds and what share of the model is sharded."""
    lines = []
    if plans.stages is not None:
        for stage, (lo, hi) in enumerate(itertools.pairwise(plans.bounds)):
            held = sum(math.prod(entry.shape) for entry in plans.ledger.held_by(stage, "param"))
            lines.append(f"stage {stage}: blocks {lo} to {hi - 1} of {plans.stages.stack}, {held / 1e6:.1f}M parameters")
    if plans.tensor_parallel is not None:
        share = plans.tensor_parallel.coverage()
        lines.append(
            f"tensor parallel: {share.paired:.0%} of the parameters in column-row pairs, {share.gathered:.0%} sharded "
            f"with gathered outputs, {share.replicated:.0%} replicated"
        )
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
    ]
    compare_over_ranks("plan", "|".join(mine), mesh.shape.describe)


def compare_over_ranks(what: str, value: str, describe: Callable[[int], str]) -> None:
    """Raise on every rank unless all ranks have the same `value`; collective over the default group.

    Raises:
        RankMismatchError: Names the ranks that differ from rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    odd = [describe(rank) for rank, other in enumerate(values) if other != values[0]]
    if odd:
        raise RankMismatchError(
            f"{', '.join(odd)} made another {what} than {describe(0)}: {sorted(set(values))}. All ranks must read the "
            "same YAML file, load the same model and run the same versions of torch and transformers."
        )


def check_plans(model: nn.Module, config: HFParallelConfig, mesh: Mesh, plans: Plans) -> None:
    """Compare loss and gradients of the cut and of the sharded model with the whole one, on rank 0; all hear the verdict.

    Raises:
        PlanError: They differ; nothing was changed.
    """
    verdict: list[str | None] = [None]
    if mesh.rank == 0:
        try:
            _check_stages(model, config, plans)
            _check_shards(model, config, plans)
        except PlanError as error:
            verdict[0] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(verdict, src=0)
    if verdict[0] is not None:
        raise PlanError(verdict[0])


def _check_stages(model: nn.Module, config: HFParallelConfig, plans: Plans) -> None:
    copies = 2 * len(plans.bounds) + 1  # a reference and one model a stage, each with gradients
    if plans.stages is None or not _affordable(model, copies, config.pipeline.self_check, "pipeline"):
        return
    samples = tiny_samples(vocab_size(model), device=next(model.parameters()).device, use_cache=False)
    check_split(model, plans.stages, plans.bounds, samples, forward_of=lambda copied: copied.forward)


def _check_shards(model: nn.Module, config: HFParallelConfig, plans: Plans) -> None:
    plan = plans.tensor_parallel
    if plan is None:
        return
    copies = 2 * (plan.tp_size + 1)
    if _affordable(model, copies, config.tensor_parallel.self_check, "tensor_parallel"):
        verify_model(model, plan, probe_batch(model, torch.device("cpu")))


def _affordable(model: nn.Module, copies: int, wish: Literal["auto", "on", "off"], section: str) -> bool:
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
    import psutil

    return int(psutil.virtual_memory().available)


def transform(model: nn.Module, plans: Plans, mesh: Mesh) -> Stage | None:
    """Call 4: cut to this rank's stage, then shard what it holds. In place; Parameter identity survives."""
    stage = None
    if plans.stages is not None:
        stage = Stage(model, plans.stages, plans.bounds, mesh.pp_rank, plans.forward)
    if plans.tensor_parallel is not None and mesh.tp_group is not None:
        apply_tensor_parallel(
            model,
            plans.tensor_parallel,
            mesh.tp_group,
            mesh.tp_rank,
            holds=lambda name: plans.ledger.holds(mesh.pp_rank, name),
        )
    return stage


def attach(
    model: nn.Module,
    stage: Stage | None,
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
        if stage is None
        else _pipeline_engine(attachment, stage, config.pipeline, plans.loss_kind)
    )
    engine.install()
    return engine


def _pipeline_engine(
    attachment: Attachment, stage: Stage, settings: PipelineConfig, loss_kind: Literal["sum_over_items", "mean"]
) -> PipelineEngine:
    mesh, watchdog = attachment.mesh, attachment.watchdog
    num_stages = mesh.shape.pp_size
    down, up = (
        make_transport(settings.transport, attachment.device, group)
        for group in (mesh.pp_down_group, mesh.pp_up_group)
        if group is not None
    )
    runtime = PipelineRuntime(
        stage, mesh.pp_rank, num_stages, down, up, probe=Probe(waits=watchdog.waits, runs=watchdog.runs)
    )
    count = settings.num_microbatches
    engine = PipelineEngine(
        attachment,
        runtime,
        actions_of=_Actions(settings.schedule, num_stages, mesh.pp_rank),
        num_microbatches=2 * num_stages if count == "auto" else count,
        loss_kind=loss_kind,
    )
    runtime.stage = engine.under_autocast(stage)
    return engine


class _Actions:
    """This rank's actions by number of microbatches, made once each."""

    def __init__(self, schedule: str, num_stages: int, stage: int) -> None:
        self._schedule, self._num_stages, self._stage = SCHEDULES[schedule], num_stages, stage
        self._made: dict[int, Sequence[Any]] = {}

    def __call__(self, num_microbatches: int) -> Sequence[Any]:
        if num_microbatches not in self._made:
            self._made[num_microbatches] = self._schedule(self._num_stages, num_microbatches)[self._stage]
        return self._made[num_microbatches]


def held_tensors(
    model: nn.Module, ledger: Ledger, stage: int
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Ledger name -> the tensor this rank holds; everything else that is still real is frozen.

    Raises:
        PlanError: The ledger expects a tensor here that the model does not have.
    """
    real = dict(model.named_parameters(remove_duplicate=False))
    real_buffers = dict(model.named_buffers(remove_duplicate=False))
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for entry in ledger.held_by(stage):
        source: Mapping[str, torch.Tensor] = real if entry.kind == "param" else real_buffers
        tensor = next((source[alias] for alias in entry.aliases if alias in source), None)
        if tensor is None:
            raise PlanError(f"{entry.name} should be on stage {stage} but the cut model does not have it.")
        if isinstance(tensor, nn.Parameter):
            parameters[entry.name] = tensor
        else:
            buffers[entry.name] = tensor
    held = {id(parameter) for parameter in parameters.values()}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.requires_grad_(False)
    return parameters, buffers
