"""Where the strategies meet: one model, one config, five visible calls.

`plan_tensor_parallel`, `discover_stages` and `build_ledger` read the whole model and change nothing; `transform` cuts it
to this rank's stage and shards what is left, in place; `attach` puts the engine in. Plans are compared across ranks
before anything is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.batches import BatchCheck
from hf_parallel.config import HFParallelConfig
from hf_parallel.engine import Attachment, DirectEngine, Engine
from hf_parallel.errors import ConfigError, PlanError, RankMismatchError, UnsupportedError
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
from hf_parallel.tensor_parallel.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan import TPPlan
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)

# `self_check: auto` copies the model once a stage on one rank; above this share of free memory it is skipped, loudly.
SELF_CHECK_MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class Plans:
    """The three pure results, equal on every rank.

    Args:
        tensor_parallel: Roles and shard layouts, None with tp_size 1.
        stages: Crossings and readers, None with pp_size 1.
        bounds: Block boundaries of the stages, [0, ..., num_blocks]; [0, 1] with pp_size 1.
        ledger: The full model's parameters.
    """

    tensor_parallel: TPPlan | None
    stages: PipelinePlan | None
    bounds: list[int]
    ledger: Ledger


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
    sample = probe_batch(model, device)
    plans = make_plans(model, config, mesh, sample)
    with watchdog.waiting("waits for the plans of the other ranks"):
        agree(plans, mesh)
    check_stages(model, config, mesh, plans, watchdog)
    kind = loss_normalisation(model, sample) if plans.stages is not None else "sum_over_items"
    forward = model.forward
    stage = transform(model, plans, mesh, forward)
    return attach(model, stage, plans, config, mesh, device=device, watchdog=watchdog, forward=forward, loss_kind=kind)


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


def make_plans(model: nn.Module, config: HFParallelConfig, mesh: Mesh, sample: Mapping[str, Any]) -> Plans:
    """Calls 1 to 3: pure, on the whole model."""
    shape = mesh.shape
    tensor_parallel = plan_tensor_parallel(model, shape.tp_size, sample) if shape.tp_size > 1 else None
    if tensor_parallel is not None:
        report_fallbacks(tensor_parallel, config.tensor_parallel.on_fallback, speaks=mesh.rank == 0)
    stages, bounds = None, [0, 1]
    if shape.pp_size > 1:
        stages = discover_stages(model, sample)
        bounds = partition(stages.num_blocks, shape.pp_size, config.pipeline.split, block_costs(model, stages))
        for boundary in bounds[1:-1]:
            stages.crossings(boundary)  # raises for a cut that cannot be addressed

    def holds(stage: int, name: str) -> bool:
        return stages is None or stages.holds(bounds[stage], bounds[stage + 1], name)

    specs = tensor_parallel.shard_specs() if tensor_parallel is not None else {}
    ledger = build_ledger(model, num_stages=shape.pp_size, holds=holds, specs=specs)
    return Plans(tensor_parallel, stages, bounds, ledger)


def report_fallbacks(plan: TPPlan, mode: str, *, speaks: bool) -> None:
    """Act on layers of the repeated blocks that run whole, or gathered, on every tp rank.

    Embeddings and the head, which stand outside the blocks, never are in a column -> row pair.

    Args:
        plan: The plan of all ranks.
        mode: `tensor_parallel.on_fallback`.
        speaks: Whether this rank logs.

    Raises:
        PlanError: There are such layers and `mode` is "error"; on every rank.
    """
    inside = {name: why for name, why in plan.fallbacks.items() if any(part.isdigit() for part in name.split("."))}
    if not inside or mode == "ignore":
        return
    name, why = next(iter(inside.items()))
    text = f"tp_size={plan.tp_size}: {len(inside)} layers are not shared as column -> row pairs (first: {name}, {why})."
    if mode == "error":
        raise PlanError(f"{text} Set tensor_parallel.on_fallback to 'warn' to train so, or choose another tp_size.")
    if speaks:
        logger.warning("hf_parallel: %s They cost more memory or communication, not correctness.", text)


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


def check_stages(model: nn.Module, config: HFParallelConfig, mesh: Mesh, plans: Plans, watchdog: Watchdog) -> None:
    """Compare loss and gradients of the cut model with the whole one, on rank 0; every rank hears the verdict.

    Raises:
        PlanError: They differ; nothing was changed.
    """
    if plans.stages is None or config.pipeline.self_check == "off":
        return
    verdict: list[str | None] = [None]
    if mesh.rank == 0:
        verdict[0] = _self_check(model, config, mesh, plans)
    if dist.is_initialized():
        with watchdog.waiting("waits for the self-check of the cut on rank 0"):
            dist.broadcast_object_list(verdict, src=0)
    if verdict[0] is not None:
        raise PlanError(verdict[0])


def _self_check(model: nn.Module, config: HFParallelConfig, mesh: Mesh, plans: Plans) -> str | None:
    """Error text of the self-check, or None."""
    if plans.stages is None:
        return None
    needed = sum(p.nbytes for p in model.parameters()) * (2 * mesh.shape.pp_size + 2)
    free = _free_bytes(next(model.parameters()).device)
    if config.pipeline.self_check == "auto" and needed > SELF_CHECK_MEMORY_SHARE * free:
        logger.warning(
            "pipeline.self_check=auto: skipped, its copies need %.1f GiB and %.1f GiB are free. The cut was not "
            "compared with the whole model; set pipeline.self_check: on to insist.",
            needed / 2**30,
            free / 2**30,
        )
        return None
    samples = tiny_samples(vocab_size(model), device=next(model.parameters()).device, use_cache=False)
    error = _split_error(model, plans.stages, plans.bounds, samples, lambda copied: copied.forward)
    if error is None or "forward" not in vars(model):
        return error
    # A function that was put over model.forward may call the forward of this very model, not that of a copy.
    if _split_error(model, plans.stages, plans.bounds, samples, lambda copied: type(copied).forward.__get__(copied)):
        return error
    logger.warning("pipeline.self_check: model.forward is patched; the check compared the forward of its class.")
    return None


def _split_error(
    model: nn.Module,
    stages: PipelinePlan,
    bounds: Sequence[int],
    samples: Sequence[Mapping[str, Any]],
    forward_of: Callable[[nn.Module], Callable[..., Any]],
) -> str | None:
    try:
        check_split(model, stages, bounds, samples, forward_of=forward_of)
    except PlanError as error:
        return str(error)
    return None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def transform(model: nn.Module, plans: Plans, mesh: Mesh, forward: Callable[..., Any]) -> Stage | None:
    """Call 4: cut to this rank's stage, then shard what it holds. In place; Parameter identity survives."""
    stage = None
    if plans.stages is not None:
        stage = Stage(model, plans.stages, plans.bounds, mesh.pp_rank, forward)
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
    forward: Callable[..., Any],
    loss_kind: Any,
) -> Engine:
    """Call 5: groups, reduction, engine; the model trains from here on."""
    parameters, buffers = held_tensors(model, plans.ledger, mesh.pp_rank)
    attachment = Attachment(
        model=model,
        forward=forward,
        device=device,
        mesh=mesh,
        ledger=plans.ledger,
        parameters=parameters,
        buffers=buffers,
        gradients=GradientSync(plans.ledger, parameters, mesh),
        batch_check=BatchCheck(mesh, config.monitor.batch_check_steps),
        watchdog=watchdog,
    )
    engine: Engine
    if stage is None:
        engine = DirectEngine(attachment)
    else:
        engine = _pipeline_engine(attachment, stage, config, loss_kind)
    engine.install()
    return engine


def _pipeline_engine(attachment: Attachment, stage: Stage, config: HFParallelConfig, loss_kind: Any) -> PipelineEngine:
    mesh, watchdog = attachment.mesh, attachment.watchdog
    num_stages = mesh.shape.pp_size
    if mesh.pp_down_group is None or mesh.pp_up_group is None:
        raise ConfigError(
            f"pp_size={num_stages} but this rank has no pipeline group. Launch pp_size x tp_size processes."
        )
    transports = [
        make_transport(config.pipeline.transport, attachment.device, group)
        for group in (mesh.pp_down_group, mesh.pp_up_group)
    ]
    runtime = PipelineRuntime(
        stage, mesh.pp_rank, num_stages, *transports, probe=Probe(waits=watchdog.waits, runs=watchdog.runs)
    )
    count = config.pipeline.num_microbatches
    engine = PipelineEngine(
        attachment,
        runtime,
        actions_of=_Actions(config.pipeline.schedule, num_stages, mesh.pp_rank),
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
