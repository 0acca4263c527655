"""What gradient compression carries from step to step, to and from a checkpoint: one file a rank.

A residual is a debt: over all ranks they sum up to what the parameters have not received yet. Another number of
replicas shares the same debt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_parallel.data_parallel.local_sgd import LocalSteps
from hf_parallel.errors import CheckpointError
from hf_parallel.gradient_compression.wire import CompressedWire
from hf_parallel.mesh import Mesh
from hf_parallel.replica_sections import GradientCompressionConfig


SEPARATOR = "::"
METADATA = "hf_parallel"


def wire_file(folder: str | Path, mesh: Mesh, dp_rank: int) -> Path:
    """Where the state of a replica of this rank's (stage, tp rank) lives."""
    return Path(folder) / f"compression-stage{mesh.pp_rank}-tp{mesh.tp_rank}-dp{dp_rank}.safetensors"


def save_wire(folder: str | Path, wire: CompressedWire, settings: GradientCompressionConfig, mesh: Mesh) -> None:
    """Write this rank's state, if there is any to be kept; every rank calls it."""
    if not settings.feeds_back or not settings.save_residual:
        return
    tensors = {
        f"{part}{SEPARATOR}{name}": tensor.detach().cpu().contiguous()
        for part, named in wire.state().items()
        for name, tensor in named.items()
    }
    description = {"method": _method_of(settings), "dp_size": mesh.shape.dp_size, "layout": _layout_of(mesh)}
    save_file(tensors, wire_file(folder, mesh, mesh.dp_rank), metadata={METADATA: json.dumps(description)})


def load_wire(folder: str | Path, wire: CompressedWire, settings: GradientCompressionConfig, mesh: Mesh) -> None:
    """Take up what `save_wire` left, shared out anew if the number of replicas changed; every rank calls it.

    Raises:
        CheckpointError: No state, an unreadable file, or that of another method or layout.
    """
    if not settings.feeds_back or not settings.save_residual:
        return
    description, mine = _read(wire_file(folder, mesh, 0))
    _check(wire_file(folder, mesh, 0), description, settings, mesh)
    saved_size = int(description["dp_size"])
    if saved_size == mesh.shape.dp_size:
        _, mine = _read(wire_file(folder, mesh, mesh.dp_rank))
    else:
        for other in range(1, saved_size):
            _, theirs = _read(wire_file(folder, mesh, other))
            for name, residual in theirs["residual"].items():
                mine["residual"][name] += residual
        mine["residual"] = {name: total / mesh.shape.dp_size for name, total in mine["residual"].items()}
    wire.load(mine)


def outer_file(folder: str | Path, mesh: Mesh) -> Path:
    """Where the outer momentum of this rank's (stage, tp rank) lives; it is equal on all replicas."""
    return Path(folder) / f"outer-stage{mesh.pp_rank}-tp{mesh.tp_rank}.safetensors"


def save_outer(folder: str | Path, local: LocalSteps, mesh: Mesh) -> None:
    """Write the outer momentum of local steps; the rank of dp 0 calls it."""
    save_file({name: tensor.cpu() for name, tensor in local.state().items()}, outer_file(folder, mesh))


def load_outer(folder: str | Path, local: LocalSteps, mesh: Mesh) -> None:
    """Take up the outer momentum; every rank calls it, after the weights were loaded.

    Raises:
        CheckpointError: There is none, or the file is damaged.
    """
    path = outer_file(folder, mesh)
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: the checkpoint was not written with local_sgd.sync_every above 1. Resume with "
            "local_sgd.sync_every: 1."
        )
    try:
        local.load(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. It is truncated or damaged.") from error


def _method_of(settings: GradientCompressionConfig) -> dict[str, Any]:
    """What a residual depends on."""
    names = {"topk": ("density",), "powersgd": ("matrix_approximation_rank",)}.get(settings.method, ())
    return {"method": settings.method, **{name: getattr(settings, name) for name in names}}


def _layout_of(mesh: Mesh) -> dict[str, int]:
    return {"pp_size": mesh.shape.pp_size, "tp_size": mesh.shape.tp_size}


def _check(path: Path, description: Mapping[str, Any], settings: GradientCompressionConfig, mesh: Mesh) -> None:
    for saved, here in ((description["layout"], _layout_of(mesh)), (description["method"], _method_of(settings))):
        if saved != here:
            raise CheckpointError(
                f"{path} holds the residuals of a run with {saved}, this run has {here}. Resume with what it was saved "
                "with, or set gradient_compression.save_residual to false to begin with none."
            )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: the checkpoint has no residuals of gradient compression for this stage and tp rank. "
            "Set gradient_compression.save_residual to false to begin with none."
        )
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})[METADATA])
            parts: dict[str, dict[str, Tensor]] = {"residual": {}, "right": {}}
            for label in file.keys():  # noqa: SIM118  not a dict
                part, name = label.split(SEPARATOR, 1)
                parts[part][name] = file.get_tensor(label)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. It is truncated or damaged.") from error
    return description, parts
