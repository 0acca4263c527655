"""All that training carries from step to step beside the weights, to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_parallel.checkpoint import load_optimizer, save_optimizer
from hf_parallel.replicas import Replicas
from hf_parallel.wire_state import load_outer, load_wire, save_outer, save_wire


if TYPE_CHECKING:
    from hf_parallel.session import Session


def save_training_state(
    folder: str | Path,
    optimizer: torch.optim.Optimizer,
    replicas: Replicas,
    parameters: Mapping[str, nn.Parameter],
    session: Session,
) -> None:
    """Write this rank's part of the optimizer state, of residuals and of outer momentum; every rank calls it."""
    mesh, config = session.mesh, session.config
    replica = mesh.dp_rank if replicas.local is not None else None
    shared_out = replicas.zero is not None or replicas.sharded is not None
    if mesh.dp_rank == 0 or shared_out or replica is not None:
        has_copies = replicas.sharded is not None and replicas.sharded.has_copies
        save_optimizer(folder, optimizer, parameters, mesh, replicas.zero, replica, has_copies=has_copies)
    if replicas.wire is not None:
        settings = config.gradient_compression if replicas.local is None else config.local_sgd.compression
        save_wire(folder, replicas.wire, settings, mesh)
    if replicas.local is not None and mesh.dp_rank == 0:
        save_outer(folder, replicas.local, mesh)


def load_training_state(
    folder: str | Path,
    optimizer: torch.optim.Optimizer,
    replicas: Replicas,
    parameters: Mapping[str, nn.Parameter],
    session: Session,
) -> None:
    """Read back what `save_training_state` wrote for this rank.

    Raises:
        CheckpointError: Something is missing, damaged, or of other settings.
    """
    mesh, config = session.mesh, session.config
    replica = mesh.dp_rank if replicas.local is not None else None
    load_optimizer(folder, optimizer, parameters, mesh, replicas.zero, replica)
    if replicas.wire is not None:
        settings = config.gradient_compression if replicas.local is None else config.local_sgd.compression
        load_wire(folder, replicas.wire, settings, mesh)
    if replicas.local is not None:
        load_outer(folder, replicas.local, mesh)
