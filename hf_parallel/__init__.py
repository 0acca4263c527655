"""3D parallel training for any `AutoModelForCausalLM` inside a stock `transformers.Trainer`.

Names are imported on first use, so that `import hf_parallel` costs milliseconds. In a process started by a launcher
the import also prepares the worker (see `hf_parallel.launch.prepare_worker`).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from hf_parallel.callback import HFParallelCallback
    from hf_parallel.config import HFParallelConfig
    from hf_parallel.errors import (
        CheckpointError,
        ConfigError,
        ParallelError,
        PlanError,
        RankFailure,
        RankMismatchError,
        ScheduleError,
        UnsupportedError,
    )
    from hf_parallel.loading.context import from_pretrained, sharded_loading
    from hf_parallel.raw_loop import HFParallelPlugin
    from hf_parallel.recipes import list_recipes, load_recipe
    from hf_parallel.replica_sections import GradientCompressionConfig, LocalSgdConfig, ZeroConfig
    from hf_parallel.sections import (
        ActivationCheckpointingConfig,
        CheckpointConfig,
        MonitorConfig,
        PipelineConfig,
        TensorParallelConfig,
    )
    from hf_parallel.trainer import HFParallelTrainer
    from hf_parallel.twin import plan_for

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointingConfig",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "GradientCompressionConfig",
    "HFParallelCallback",
    "HFParallelConfig",
    "HFParallelPlugin",
    "HFParallelTrainer",
    "LocalSgdConfig",
    "MonitorConfig",
    "ParallelError",
    "PipelineConfig",
    "PlanError",
    "RankFailure",
    "RankMismatchError",
    "ScheduleError",
    "TensorParallelConfig",
    "UnsupportedError",
    "ZeroConfig",
    "from_pretrained",
    "list_recipes",
    "load_recipe",
    "plan_for",
    "sharded_loading",
]

_HOMES = {
    "GradientCompressionConfig": "replica_sections",
    "HFParallelCallback": "callback",
    "HFParallelConfig": "config",
    "HFParallelPlugin": "raw_loop",
    "HFParallelTrainer": "trainer",
    "LocalSgdConfig": "replica_sections",
    "ZeroConfig": "replica_sections",
    "from_pretrained": "loading.context",
    "list_recipes": "recipes",
    "load_recipe": "recipes",
    "plan_for": "twin",
    "sharded_loading": "loading.context",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name) or ("sections" if name.endswith("Config") else "errors")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if "LOCAL_RANK" in os.environ:
    from hf_parallel.launch import prepare_worker

    prepare_worker()
