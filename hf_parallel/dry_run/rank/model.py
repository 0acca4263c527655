"""The model of a dry run: built without values, planned as rank 0 plans it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from hf_parallel.dry_run.rank.stand_in import stand_in_for
from hf_parallel.engine.parallelize import needs_probes
from hf_parallel.engine.plan.plans import Plans, make_plans
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.errors import ConfigError
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.memory.unread import build_on_meta, first_line
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.meta import off_meta
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


FOREVER_S = 1e9


def build(config: Any, dtype: torch.dtype, lora_rank: int = 0) -> nn.Module:
    """The model of a transformers config, without values.

    Args:
        config: A transformers config.
        dtype: Dtype of its parameters.
        lora_rank: Rank of LoRA on its linear layers; 0 trains the model itself.

    Raises:
        ConfigError: There is no causal language model for it, or PEFT is not installed or has no adapters for its layers.
    """
    model: nn.Module = build_on_meta(copy.deepcopy(config), dtype=dtype)
    return (_with_lora(model, lora_rank) if lora_rank else model).train()


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(f"lora_rank={rank}: adapters need PEFT. Install peft, or leave lora_rank out.") from None
    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(
                model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
            )
    except ValueError as error:  # a type of which some layers take none, or a model without linear layers
        raise ConfigError(
            f"lora_rank={rank}: PEFT puts no adapters on all linear layers of {type(model).__name__}: {first_line(error)} Leave lora_rank out."
        ) from error
    return adapted


@dataclass(frozen=True)
class Planned:
    """A whole model and what was planned for it.

    Args:
        model: Without values.
        plans: The same on every rank.
        setup: Setup of rank 0 that it was planned with, without groups.
    """

    model: nn.Module
    plans: Plans
    setup: Setup


def plan_alone(
    model: nn.Module, model_config: Any, config: HFParallelConfig, schedule: ScheduleChoice, shape: MeshShape
) -> Planned:
    """Plan as rank 0 does for all, without other ranks.

    Args:
        model: Model without values.
        model_config: Config of the model.
        config: Validated settings.
        schedule: The pipeline schedule that they ask for.
        shape: Shape of the mesh.

    Raises:
        PlanError: The same as in a run.
    """
    host = torch.device("cpu")
    watchdog = Watchdog(None, 0, [shape.describe(rank) for rank in range(shape.world_size)], FOREVER_S)
    mesh = Mesh(shape, 0, timedelta(seconds=60), Links(1, shape.world_size, shape.world_size))
    setup = Setup(model, config, schedule, mesh, host, watchdog)
    if not needs_probes(config):
        return Planned(model, make_plans(setup, None), setup)
    probes = Probes(model, host, None)
    with off_meta(model, host):
        return Planned(model, make_plans(setup, probes, stand_in_for(model, model_config)), setup)
