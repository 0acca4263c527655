"""The model of a dry run: built without values, planned as rank 0 plans it, then given fake memory on its device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_buffers, own_parameters
from hf_parallel.compat.torch_tools import FakeTensorMode
from hf_parallel.dry_run.memory.shape import on_meta
from hf_parallel.dry_run.rank.narrow_plan import stand_in_for
from hf_parallel.engine.parallelize import needs_probes
from hf_parallel.engine.plans import Plans, make_plans
from hf_parallel.engine.setup import Setup
from hf_parallel.mesh import Mesh, MeshShape
from hf_parallel.model.meta import off_meta
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.watchdog import Watchdog


FOREVER_S = 1e9


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a transformers config, without values.

    Raises:
        ConfigError: There is no causal language model for it.
    """
    model: nn.Module = on_meta(copy.deepcopy(config), dtype=dtype)
    return model.train()


@dataclass(frozen=True)
class Planned:
    """A whole model and what was planned for it.

    Args:
        model: Without values.
        plans: The same on every rank.
        setup: As planned with, of rank 0 and without groups.
    """

    model: nn.Module
    plans: Plans
    setup: Setup


def plan_alone(
    model: nn.Module, model_config: Any, config: HFParallelConfig, schedule: ScheduleChoice, shape: MeshShape
) -> Planned:
    """Plan as rank 0 does for all, without other ranks.

    Args:
        model: Without values.
        model_config: Of the model.
        config: Validated settings.
        schedule: The pipeline schedule that they ask for.
        shape: Of the mesh.

    Raises:
        PlanError: As of a run.
    """
    host = torch.device("cpu")
    watchdog = Watchdog(None, 0, [shape.describe(rank) for rank in range(shape.world_size)], FOREVER_S)
    mesh = Mesh(shape, 0, None, None, None, None, None, None, timedelta(seconds=60))
    setup = Setup(model, config, schedule, mesh, host, watchdog)
    if not needs_probes(config):
        return Planned(model, make_plans(setup, None), setup)
    probes = Probes(model, host, None)
    with off_meta(model, host):
        return Planned(model, make_plans(setup, probes, stand_in_for(model, model_config)), setup)


def give_memory(
    model: nn.Module,
    device: torch.device,
    fake: FakeTensorMode,
    follow: Callable[[Tensor, str, str], None] | None = None,
) -> None:
    """Give fake memory to every tensor of a model that has none; tensors that are one stay one.

    Args:
        model: With parameters and buffers on `meta`.
        device: Where they go.
        fake: Of whose tensors.
        follow: Called with each tensor that takes memory, what it is, and its name.
    """
    made: dict[int, Tensor] = {}
    for name, table, key, tensor in _tensors_of(model):
        if id(tensor) not in made:
            with fake:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            vars(made[id(tensor)]).update(
                {k: v for k, v in vars(tensor).items() if k not in vars(made[id(tensor)]) and not k.startswith("_")}
            )
            if follow is not None:
                follow(made[id(tensor)], "weights", name)
        table[key] = made[id(tensor)]
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_meta:
                with fake:  # stands for a weight that another stage has
                    one = torch.zeros((), dtype=value.dtype, device=device)
                    object.__setattr__(module, key, one.expand(value.shape))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Name, table, key and tensor of everything registered that is not on its device yet."""
    for prefix, module in model.named_modules():
        for table in (own_parameters(module), own_buffers(module)):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, table, key, tensor
