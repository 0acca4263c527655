"""`torch_compile` of TrainingArguments and `dynamo_backend` of an Accelerator mean: each block is compiled by itself."""

from __future__ import annotations

import os
from typing import get_args

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from hf_parallel.errors import ConfigError
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.sections import Backend


def with_compiled_blocks(
    config: HFParallelConfig, schedule: ScheduleChoice, plugin: TorchDynamoPlugin
) -> tuple[HFParallelConfig, ScheduleChoice]:
    """The settings of a run whose TrainingArguments or Accelerator may ask for compilation, and their schedule.

    Args:
        config: The settings.
        schedule: The schedule that they ask for.
        plugin: Compilation that accelerate was asked for.

    Raises:
        ConfigError: It asks for a backend or an option that blocks are not compiled with, or for another backend than the
            settings do, or a layout does not allow it.
    """
    if plugin.backend == DynamoBackend.NO:
        return config, schedule
    backend, mine = str(plugin.backend.value).lower(), config.pipeline.compile_blocks
    asked = f"torch_compile (or dynamo_backend) with backend={backend}"
    known = [name for name in get_args(Backend) if name != "none"]
    options = {
        "mode": (plugin.mode, ("default", None)),
        "fullgraph": (plugin.fullgraph, (False, None)),
        "dynamic": (plugin.dynamic, (None, False) if _launched_without_dynamic() else (None,)),
    }
    problems = [
        f"{asked}: {name}={value} has no effect on blocks, which are compiled with torch's defaults. Leave {name} unset."
        for name, (value, stock) in options.items()
        if value not in stock
    ]
    if backend not in known:
        problems.append(f"{asked}: blocks are compiled with {' or '.join(known)}. Set the backend to one of them.")
    elif mine not in ("none", backend):
        problems.append(f"{asked}, and pipeline.compile_blocks={mine}. Set one of them, or both alike.")
    if problems:
        raise ConfigError("\n".join(problems))
    given = config.model_dump(exclude_defaults=True)
    try:
        compiled = HFParallelConfig(**{**given, "pipeline": {**given.get("pipeline", {}), "compile_blocks": backend}})
    except ConfigError as error:
        raise ConfigError(
            f"{asked} compiles every block, as pipeline.compile_blocks={backend} does, and other settings do not allow it. Leave "
            f"torch_compile (or dynamo_backend) unset, or change them. {error}"
        ) from error
    return compiled, ScheduleChoice(compiled.pipeline, compiled.pp_size)


def _launched_without_dynamic() -> bool:
    """Whether `accelerate launch` wrote this down unasked, as it does for every file with a `dynamo_backend`."""
    return os.environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC", "").lower() == "false"
