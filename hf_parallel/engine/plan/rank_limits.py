"""Limits of a pipeline's ranks where they are not alike: how fast each is, and how much it may hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import stored_bytes
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.errors import PlanError
from hf_parallel.machine.ram import free_ram
from hf_parallel.mesh.ranks import ranks_per_node
from hf_parallel.pipeline_parallel.plan.stage_memory import StageMemory, memory_of
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan
from hf_parallel.tensor_parallel.shard_plan import TPPlan


WIDTHS: Final = {"cpu": 512}  # of the square matrices that are multiplied; a GPU needs larger ones to be busy
WIDTH_OF_OTHERS: Final = 4096
MEASURED_S: Final = 0.4  # above the period in which a container is throttled (0.1 s)
ALIKE: Final = 0.9  # of the fastest: what a measurement of equal ranks may differ by


@dataclass(frozen=True)
class RankLimits:
    """Limits that the cut has to respect, by pipeline rank; the same on every rank.

    Args:
        speeds: Relative to the first one; None if all are alike.
        memory: Bytes; None without a limit.
    """

    speeds: tuple[float, ...] | None = None
    memory: tuple[float, ...] | None = None

    def stage_speeds(self, placement: tuple[int, ...]) -> tuple[float, ...] | None:
        """Speed of the rank of each stage."""
        return None if self.speeds is None else tuple(self.speeds[rank] for rank in placement)


def rank_limits(setup: Setup) -> RankLimits:
    """Read or measure the limits of the ranks; collective over the default group where something is measured.

    Ranks at the same place of their pipelines (replicas, tensor-parallel ranks) wait for each other: the slowest and the
    smallest of them count.
    """
    speed, memory = setup.config.pipeline.rank_speed, setup.config.pipeline.rank_memory_gb
    mine = [0.0, 0.0]
    if memory == "auto":
        mine[1] = device_bytes(setup.device)
    if speed == "auto":
        _meet(setup)
        mine[0] = products_per_s(setup.model, setup.device)
    slowest, smallest = _least(setup, mine) if "auto" in (speed, memory) else ((), ())
    speeds = relative_speeds(slowest) if speed == "auto" else speed
    return RankLimits(
        tuple(one / speeds[0] for one in speeds) if speeds is not None and len(set(speeds)) > 1 else None,
        smallest if memory == "auto" else None if memory is None else tuple(1e9 * one for one in memory),
    )


def products_per_s(model: nn.Module, device: torch.device, seconds: float = MEASURED_S) -> float:
    """Matrix products that this rank does in a second, in the model's dtype.

    Args:
        model: Its first floating-point parameter has the dtype.
        device: Device that computes them.
        seconds: To measure for, above 0.
    """
    width = WIDTHS.get(device.type, WIDTH_OF_OTHERS)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    matrix = torch.ones(width, width, dtype=dtype, device=device)  # (width, width)

    def finished() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    matrix @ matrix  # warms up
    begun, count, at = finished(), 0, 0.0
    while at < seconds:
        matrix @ matrix
        count, at = count + 1, finished() - begun
    return count / at


def relative_speeds(measured: Sequence[float]) -> tuple[float, ...]:
    """Speeds relative to the fastest, of which those near it are as fast: equal ranks get the cut of equal ranks.

    Args:
        measured: Speed of each rank, in any unit.

    Raises:
        PlanError: The speed of a rank is 0.
    """
    top = max(measured)
    if min(measured) <= 0:
        raise PlanError(
            f"pipeline.rank_speed=auto: measured {list(measured)} matrix products a second. Give the speeds as a list."
        )
    return tuple(1.0 if one >= ALIKE * top else max(0.01, round(one / top, 2)) for one in measured)


def device_bytes(device: torch.device) -> float:
    """Memory that this rank may use: of its GPU what other processes leave, on the CPU its share of the free RAM."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    return free_ram() / ranks_per_node()


def stage_memory(setup: Setup, plan: PipelinePlan, shards: TPPlan | None, limits: tuple[float, ...]) -> StageMemory:
    """Count the bytes that stages need: this rank's shards of weights and gradients, Adam's two states, activations."""
    specs, zero = shards.shard_specs() if shards is not None else {}, setup.config.zero
    shape = setup.mesh.shape
    replicas = (
        1
        if not zero.stage
        else shape.num_copies
        if zero.dp_shard_size == "auto"
        else zero.dp_shard_size * shape.sp_size
    )

    def bytes_of(name: str, tensor: Tensor) -> float:
        size, spec = stored_bytes(tensor), specs.get(name)
        if spec is not None:
            size = size // spec.full_size * spec.local_size(shape.tp_size, 0)
        states = 2 / replicas if zero.offload_optimizer == "none" else 0
        return size * (2 + states if tensor.requires_grad else 1)

    return memory_of(setup.model, plan, setup.schedule.typical(), limits, bytes_of=bytes_of)


def describe_limits(limits: RankLimits) -> list[str]:
    """Lines for a person."""
    lines = []
    if limits.speeds is not None:
        top = max(limits.speeds)
        lines.append(f"speed of the pipeline's ranks: {', '.join(f'{one / top:.2f}' for one in limits.speeds)}")
    if limits.memory is not None:
        lines.append(f"memory of the pipeline's ranks: {', '.join(f'{one / 1e9:.2f}' for one in limits.memory)} GB")
    return lines


def _meet(setup: Setup) -> None:
    """Wait for the other ranks, so that all measure at the same time, as they will compute; collective."""
    if dist.is_initialized():
        with setup.watchdog.waiting("waits to measure the speed of all ranks at the same time"):
            dist.barrier(group=setup.mesh.host_group)


def _least(setup: Setup, mine: list[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The smallest speed and the smallest memory at each place of a pipeline; collective."""
    found: list[list[float]] = [mine]
    if dist.is_initialized():
        found = [[] for _ in range(dist.get_world_size())]
        with setup.watchdog.waiting("waits for the measured speed of the other ranks"):
            dist.all_gather_object(found, mine, group=setup.mesh.host_group)
    shape = setup.mesh.shape
    places: list[list[list[float]]] = [[] for _ in range(shape.pp_size)]
    for rank, one in enumerate(found):
        places[shape.coordinates(rank)[1]].append(one)
    least = [tuple(map(min, zip(*place, strict=True))) for place in places]
    return tuple(one[0] for one in least), tuple(one[1] for one in least)
