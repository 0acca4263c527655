"""State that gradient compression and local steps carry from step to step, as pieces.

A residual is a debt: over all replicas they sum up to what the parameters have not received yet. Another number of
replicas shares the same debt. The outer momentum of local steps is equal on all replicas. The thin matrices of PowerSGD
only make its next round more exact: those of other tensor-parallel shards are left, and the round starts again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_parallel.checkpoints.state.dcp import TensorIndex
from hf_parallel.checkpoints.state.optimizer import SEPARATOR, WHOLE, Place
from hf_parallel.checkpoints.state.pieces import Piece, is_writer, local_shape, pieces_of
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.local_sgd import LocalSteps
from hf_parallel.errors import CheckpointError
from hf_parallel.settings.replica_sections import GradientCompressionConfig


logger = logging.getLogger(__name__)

RESIDUAL, RIGHT, OUTER = (f"{kind}{SEPARATOR}" for kind in ("residual", "right", "outer"))
BEHIND = f"behind{SEPARATOR}"  # weights of earlier updates


def keeps_debt(settings: GradientCompressionConfig) -> bool:
    """Whether checkpoints hold what is to be fed back."""
    return settings.feeds_back and settings.save_residual


def method_of(settings: GradientCompressionConfig) -> dict[str, Any]:
    """Settings that a residual depends on."""
    names = {"topk": ("density",), "powersgd": ("matrix_approximation_rank",)}.get(settings.method, ())
    return {"method": settings.method, **{name: getattr(settings, name) for name in names}}


def wire_pieces(wire: CompressedWire, place: Place) -> list[Piece]:
    """Collect the state of a wire that this rank writes: its own residuals, and its share of what all replicas have."""
    pieces: list[Piece] = []
    state, mesh = wire.state(), place.mesh
    for name, residual in state.get("residual", {}).items():
        entry = place.ledger.entries[name]
        if place.owns(entry):
            label = f"{RESIDUAL}{name}@dp{mesh.dp_rank}"
            pieces += pieces_of(label, entry, mesh, residual.detach().contiguous(), counted_only=True)
    for name, thin in state.get("right", {}).items():
        entry = place.ledger.entries[name]
        mark = place.shard_mark(entry)
        writes = place.owns(entry) and is_writer(name, mesh.dp_rank, mesh.shape.dp_size)
        if writes and (mark != WHOLE or mesh.tp_rank == 0):
            pieces.append(Piece(f"{RIGHT}{name}{mark}", tuple(thin.shape), (0,) * thin.ndim, thin.detach()))
    return pieces


def restore_wire(
    wire: CompressedWire,
    index: TensorIndex,
    saved: Mapping[str, Any] | None,
    settings: GradientCompressionConfig,
    names: Sequence[str],
    place: Place,
) -> None:
    """Take up what `wire_pieces` left, redistributed if the number of replicas changed.

    Args:
        wire: The wire.
        index: Index of the checkpoint's tensors.
        saved: Facts of the checkpoint about its wire: `method` and `dp_size`; None if it had none.
        settings: Settings of this run.
        names: Parameters on this rank.
        place: Position of this rank.

    Raises:
        CheckpointError: No residuals, those of another method, or a damaged file.
    """
    if saved is None:
        raise CheckpointError(
            f"{index.folder} has no residuals of gradient compression. Set gradient_compression.save_residual to false "
            "to begin with none."
        )
    if saved["method"] != method_of(settings):
        raise CheckpointError(
            f"{index.folder} holds the residuals of a run with {saved['method']}, this run has {method_of(settings)}. "
            "Resume with what it was saved with, or set gradient_compression.save_residual to false to begin with none."
        )
    residuals = _residuals(index, int(saved["dp_size"]), names, place)
    right = _right(index, names, place) if settings.method == "powersgd" else {}
    wire.load({"residual": residuals, "right": right})


def _residuals(index: TensorIndex, saved_size: int, names: Sequence[str], place: Place) -> dict[str, Tensor]:
    mesh = place.mesh
    same = saved_size == mesh.shape.dp_size
    found = {}
    for name in names:
        entry = place.ledger.entries[name]
        labels = [f"{RESIDUAL}{name}@dp{rank}" for rank in ([mesh.dp_rank] if same else range(saved_size))]
        total: Tensor | None = None
        for label in labels:
            if label in index.tensors:
                one = torch.zeros(local_shape(entry, mesh), dtype=index.tensors[label][1])
                index.read(list(pieces_of(label, entry, mesh, one)))
                total = one if total is None else total + one
        if total is not None:
            found[name] = total if same else total / mesh.shape.dp_size
    return found


def _right(index: TensorIndex, names: Sequence[str], place: Place) -> dict[str, Tensor]:
    found, left = {}, []
    for name in names:
        label = f"{RIGHT}{name}{place.shard_mark(place.ledger.entries[name])}"
        if label in index.tensors:
            shape, dtype = index.tensors[label]
            found[name] = torch.zeros(shape, dtype=dtype)
            index.read([Piece(label, shape, (0,) * len(shape), found[name])])
        elif any(other.startswith(f"{RIGHT}{name}@") for other in index.tensors):
            left.append(name)
    if left and place.mesh.rank == 0:
        logger.warning(
            "hf_parallel: PowerSGD starts again for %d parameters such as %s: the checkpoint has their thin matrices for "
            "other tensor-parallel shards.",
            len(left),
            left[0],
        )
    return found


def outer_pieces(local: LocalSteps, place: Place) -> list[Piece]:
    """Collect the outer momentum of local steps that this rank writes."""
    pieces: list[Piece] = []
    for name, momentum in local.state().items():
        entry, label = place.ledger.entries[name], f"{OUTER}{name}"
        if place.owns(entry) and is_writer(label, place.mesh.dp_rank, place.mesh.shape.dp_size):
            pieces += pieces_of(label, entry, place.mesh, momentum.contiguous(), counted_only=True)
    return pieces


def restore_outer(local: LocalSteps, index: TensorIndex, names: Sequence[str], place: Place) -> None:
    """Take up the outer momentum, after the weights were loaded; where there is none it begins at zero."""
    found = {}
    for name in names:
        label, entry = f"{OUTER}{name}", place.ledger.entries[name]
        if label in index.tensors:
            found[name] = torch.zeros(local_shape(entry, place.mesh), dtype=index.tensors[label][1])
            index.read(list(pieces_of(label, entry, place.mesh, found[name])))
    local.load(found)


def older_pieces(older: Sequence[Mapping[str, Tensor]], place: Place) -> list[Piece]:
    """Collect the older versions of the weights that this rank writes, the oldest first."""
    pieces: list[Piece] = []
    for index, weights in enumerate(older):
        for name, weight in weights.items():
            entry, label = place.ledger.entries[name], f"{BEHIND}{len(older) - index}{SEPARATOR}{name}"
            if place.owns(entry) and is_writer(label, place.mesh.dp_rank, place.mesh.shape.dp_size):
                pieces += pieces_of(label, entry, place.mesh, weight.contiguous(), counted_only=True)
    return pieces


def restore_older(
    index: TensorIndex, parameters: Mapping[str, Tensor], delay: int, place: Place
) -> list[dict[str, Tensor]]:
    """Read the weights of up to `delay` updates ago that `older_pieces` wrote, the oldest first; empty if some are missing."""
    found: list[dict[str, Tensor]] = []
    for behind in range(delay, 0, -1):
        weights: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            label, entry = f"{BEHIND}{behind}{SEPARATOR}{name}", place.ledger.entries[name]
            if label not in index.tensors:
                return []
            weights[name] = torch.zeros(local_shape(entry, place.mesh), dtype=parameter.dtype)
            index.read(list(pieces_of(label, entry, place.mesh, weights[name])))
        found.append(weights)
    return found
