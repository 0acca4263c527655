"""This rank's part of a run, as the checkpoints of a Trainer and of a loop of one's own read and write it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hf_parallel.checkpoints.state.training_state import Holdings
from hf_parallel.checkpoints.weights.adapters import has_adapters, load_adapters
from hf_parallel.checkpoints.weights.converted import conversion_of
from hf_parallel.checkpoints.weights.gather import load_weights
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.settings.config import HFParallelConfig


def holdings_of(engine: Engine, config: HFParallelConfig) -> Holdings:
    """The parts of the run that this rank holds.

    Args:
        engine: Engine of the model.
        config: Settings of the run.
    """
    attachment = engine.attachment
    replicas = attachment.gradients.replicas
    settings = config.gradient_compression if replicas.local is None else config.local_sgd.compression
    held = attachment.parameters, attachment.buffers
    asynchronous = engine.asynchronous if isinstance(engine, PipelineEngine) else None
    versions = asynchronous.versions if asynchronous is not None else None
    return Holdings(attachment.ledger, attachment.mesh, *held, replicas, settings, versions)


def load_held_weights(folder: Path, model: nn.Module, holdings: Holdings) -> None:
    """Read this rank's parameters and buffers; those of adapters alone, if the model has any."""
    if has_adapters(model):
        load_adapters(folder, model, holdings.ledger, holdings.tensors, holdings.mesh)
    else:
        converted = conversion_of(folder, model)
        load_weights(folder, holdings.ledger, holdings.tensors, holdings.mesh, converted=converted)


def dropout_step(engine: Engine | None) -> int | None:
    """The step of a pipeline's random numbers; None without stages, whose random numbers are torch's own."""
    return engine.seeds.step if isinstance(engine, PipelineEngine) else None


def resume_dropout(engine: Engine | None, step: int | None) -> None:
    """Go on with the random numbers of a step, if the run that saved it had stages and this one has."""
    if isinstance(engine, PipelineEngine) and step is not None:
        engine.seeds.step = step
