"""A model for inference beside the trained one: a reference model, a teacher. Cut and sharded by the same steps, run forward only.

Its settings are those of the run without what concerns gradients, optimizers and activations. Where it cannot be parallelized
exactly it stays whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_parallel.checkpoints.weights.unread import unread_of
from hf_parallel.engine.parallelize import parallelize
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.engine.run.pipeline_inputs import REFUSED, unserved_outputs
from hf_parallel.errors import ConfigError, PlanError, UnsupportedError
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.mesh.groups import Mesh
from hf_parallel.model.tensors import tensors_in
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import GradientCompressionConfig, LocalSgdConfig, ZeroConfig
from hf_parallel.settings.sections import ActivationCheckpointingConfig, MonitorConfig, PipelineConfig


WHOLE = "Leave it out of accelerator.prepare() and move it to the device yourself: then every rank has all of it."


def settings_of(config: HFParallelConfig) -> HFParallelConfig:
    """The settings of a model for inference in a run with `config`."""
    given, zero = config.pipeline, config.zero
    pipeline = PipelineConfig(
        num_microbatches=given.parts_of_batch(config.pp_size),
        split="balanced" if isinstance(given.split, tuple) else given.split,  # its blocks are others
        rank_speed=given.rank_speed,
        self_check=given.self_check,
        transport=given.transport,
    )
    return config.model_copy(
        update={
            "chunked_loss": False,
            "pipeline": pipeline,
            "zero": zero if zero.shards_parameters else ZeroConfig(),
            "activation_checkpointing": ActivationCheckpointingConfig(),
            "gradient_compression": GradientCompressionConfig(),
            "local_sgd": LocalSgdConfig(),
            "monitor": MonitorConfig(),
        }
    )


def why_whole(model: nn.Module, config: HFParallelConfig) -> str | None:
    """Why a model for inference stays whole whatever it is, in words; None if it may be cut and sharded."""
    if config.sp_size > 1 or config.ep_size > 1:
        return f"sp_size={config.sp_size}, ep_size={config.ep_size}: rows and experts are shared by the trained model only"
    unserved = unserved_outputs(model) if config.pp_size > 1 else []
    if unserved:
        return f"its config asks for {', '.join(unserved)}, which stages do not give"
    return None


def parallelize_beside(
    model: nn.Module,
    config: HFParallelConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    watchdog: Watchdog,
    compute_dtype: torch.dtype | None,
    watching: Callable[[], Sequence[object]],
) -> Engine | str:
    """Turn a whole model for inference into this rank's part of it; collective. Nothing of it is trained from here on.

    Args:
        model: Whole, the same on every rank.
        config: The settings of the run.
        mesh: This rank's mesh.
        device: Device of the model.
        watchdog: For waits.
        compute_dtype: Autocast dtype of forward passes; None without autocast.
        watching: Gives the modes that follow what user code computes around the trained model.

    Returns:
        The engine, installed as `model.forward`; or why the model is as it was.
    """
    reason, unread = why_whole(model, config), unread_of(model)
    if unread is not None:
        unread.check(config)
    if reason is not None:
        _read_whole(model, mesh, device)
        return reason
    settings, flags = settings_of(config), {name: p.requires_grad for name, p in model.named_parameters()}
    before = _shapes(model)
    if unread is not None:
        unread.config = settings
    model.requires_grad_(False)
    try:
        engine = parallelize(
            model,
            settings,
            mesh,
            schedule=ScheduleChoice(settings.pipeline, settings.pp_size),
            device=device,
            watchdog=watchdog,
            compute_dtype=compute_dtype,
        )
    except (PlanError, ConfigError, UnsupportedError) as error:
        watchdog.runs()
        if _shapes(model) != before:
            raise
        _read_whole(model, mesh, device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
        return str(error)
    _run_forward_only(engine, watching)
    return engine


def _read_whole(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Read the weights of a model that has none yet; collective."""
    unread = unread_of(model)
    if unread is not None:
        unread.begin(model)
        unread.fill(model, None, mesh, device)


def _shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


def _run_forward_only(engine: Engine, watching: Callable[[], Sequence[object]]) -> None:
    """Record no graph in calls of a model of which nothing is trained: its stages have no backward for it."""
    model, inner = engine.model, engine.model.forward
    refused = REFUSED if isinstance(engine, PipelineEngine) else ()

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _refuse_call(type(model).__name__, args, kwargs, refused)
        engine.watching = watching()
        with torch.no_grad():
            return inner(*args, **kwargs)

    vars(model)["forward"] = forward


def _refuse_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], refused: Sequence[str]) -> None:
    given = [key for key in refused if kwargs.get(key) not in (None, False)]
    if given:
        raise UnsupportedError(
            f"{', '.join(given)} in a call of {name}, a model for inference that is cut into stages, which give its loss, logits and "
            f"what else its forward makes of rows. {WHOLE}"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in([*args, *kwargs.values()])):
        raise UnsupportedError(
            f"an input of {name}, a model for inference that is cut or sharded, requires a gradient, which it does not pass back. "
            f"{WHOLE}"
        )
