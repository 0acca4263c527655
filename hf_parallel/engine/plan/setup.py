"""The arguments of every step of parallelizing a model: the model, the settings, and the place of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_parallel.engine.plan.verdicts import Verdicts
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.mesh.groups import Mesh
from hf_parallel.monitor.recorder import Recorder, silent
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.tensor_parallel.shard_plan import TPPlan


@dataclass(frozen=True)
class Setup:
    """One model on one rank.

    Args:
        model: A causal language model, whole until it is cut.
        config: The validated settings.
        schedule: The pipeline schedule that they ask for.
        mesh: This rank's mesh.
        device: Device of the model.
        watchdog: For waits.
        verdicts: Verdicts of earlier starts.
        recorder: Keeps when this rank does what.
    """

    model: nn.Module
    config: HFParallelConfig
    schedule: ScheduleChoice
    mesh: Mesh
    device: torch.device
    watchdog: Watchdog
    verdicts: Verdicts = field(default_factory=Verdicts)
    recorder: Recorder = field(default_factory=silent)

    @property
    def name(self) -> str:
        """Class name of the model, for messages."""
        return type(self.model).__name__

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for all."""
        return self.mesh.rank == 0


@dataclass(frozen=True)
class StandIn:
    """Answers what takes values, for a model whose values are not read yet. Only rank 0 asks.

    Args:
        plan: Makes a plan as `plan_model` does, from tp_size, sample and settings.
        model: Makes a small model on the CPU that computes its loss as the model does, from a batch, and the batch for it.
    """

    plan: Callable[..., TPPlan]
    model: Callable[[Mapping[str, Any]], tuple[nn.Module, Mapping[str, Any]]]
