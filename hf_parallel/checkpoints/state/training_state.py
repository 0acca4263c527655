"""All that training carries from step to step beside the weights, to and from a checkpoint, whatever the layout.

Tensors are in the folder `training_state` (see `checkpointing`); `training_state.json` says what they are: the layout they
were saved under, the optimizer's groups by parameter name, and what is one number for a parameter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.checkpoints.agree import everyone, together
from hf_parallel.checkpoints.state.dcp import INDEX, TensorIndex, save_pieces
from hf_parallel.checkpoints.state.description import DESCRIPTION, FORMAT, TENSORS, read_description
from hf_parallel.checkpoints.state.groups import Groups
from hf_parallel.checkpoints.state.groups import together as groups_together
from hf_parallel.checkpoints.state.lost import what_is_lost
from hf_parallel.checkpoints.state.optimizer import OptimizerView, Place, decode, state_pieces
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.residuals import (
    keeps_debt,
    method_of,
    older_pieces,
    outer_pieces,
    restore_older,
    restore_outer,
    restore_wire,
    wire_pieces,
)
from hf_parallel.checkpoints.state.restore import SavedState, restore
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.errors import CheckpointError, UnsupportedError
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.replica_sections import GradientCompressionConfig


__all__ = ["DESCRIPTION", "TENSORS", "read_description"]

logger = logging.getLogger(__name__)


class Versions(Protocol):
    """The weights of several updates, on one rank."""

    def older(self) -> list[dict[str, torch.Tensor]]:
        """Name -> weight of each version beside the newest, the oldest first."""
        ...

    def restore(self, older: list[dict[str, torch.Tensor]]) -> None:
        """Take up what `older` gave; an empty list begins all versions with the newest."""
        ...


@dataclass(frozen=True)
class Holdings:
    """The parts of a run that a rank holds and that a checkpoint keeps.

    Args:
        ledger: The model's ledger.
        mesh: This rank's mesh.
        parameters: Ledger name -> this rank's parameter.
        buffers: Ledger name -> this rank's persistent buffer.
        replicas: Reduction over the replicas; None for a process that trains alone.
        compression: Settings by which gradients, or pseudo-gradients, are sent.
        versions: The weights of several updates, of an asynchronous schedule; None of another.
    """

    ledger: Ledger
    mesh: Mesh
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    replicas: Replicas | None = None
    compression: GradientCompressionConfig = field(default_factory=GradientCompressionConfig)
    versions: Versions | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {**self.parameters, **self.buffers}

    def view(self, optimizer: torch.optim.Optimizer) -> OptimizerView:
        """An optimizer as it is laid out here."""
        if self.replicas is None:
            return OptimizerView(optimizer, self.parameters)
        sharded = self.replicas.sharded
        has_copies = sharded is not None and sharded.has_copies
        return OptimizerView(optimizer, self.parameters, self.replicas.zero, has_copies)

    @property
    def has_local_steps(self) -> bool:
        """Whether each replica has an optimizer state of its own."""
        return self.replicas is not None and self.replicas.local is not None

    def place(self) -> Place:
        """Position of this rank among those that write the same state."""
        mesh = self.mesh
        if self.has_local_steps:
            return Place(self.ledger, mesh, replica=mesh.dp_rank)
        replicas = self.replicas
        if replicas is not None and (replicas.zero is not None or replicas.sharded is not None):
            copies = mesh.dp_replicate_group
            return Place(self.ledger, mesh) if copies is None else self._copy(copies.rank(), copies.size())
        return self._copy(mesh.copy_rank, mesh.shape.num_copies)

    def _copy(self, copy: int, copies: int) -> Place:
        return Place(self.ledger, self.mesh, copy=copy, copies=copies)

    def place_in(self, saved_replicas: int | None) -> Place:
        """Position whose saved state this rank takes up.

        Args:
            saved_replicas: Number of replicas that had a state of their own; None if they shared one.
        """
        if saved_replicas is None:
            return Place(self.ledger, self.mesh)
        return Place(self.ledger, self.mesh, replica=self.mesh.dp_rank % saved_replicas if self.has_local_steps else 0)


@dataclass(frozen=True)
class Snapshot:
    """The training state that one rank writes.

    Args:
        pieces: Its tensors.
        description: The content of `training_state.json`; the same on every rank.
        groups: The optimizer's parameter groups, of all ranks.
    """

    pieces: list[Piece]
    description: dict[str, Any]
    groups: Groups


def snapshot(
    folder: Path, holdings: Holdings, optimizer: torch.optim.Optimizer, dropout_step: int | None = None
) -> Snapshot:
    """Collect what this rank writes of the training state; every rank calls it. Tensors are views, nothing is copied.

    Args:
        folder: Folder that it will be written to, for messages.
        holdings: The tensors of this rank.
        optimizer: The optimizer.
        dropout_step: Step that the masks of a pipeline are drawn for; None without a pipeline.
    """
    view, place, replicas = holdings.view(optimizer), holdings.place(), holdings.replicas
    wire = replicas.wire if replicas is not None and keeps_debt(holdings.compression) else None
    with together(holdings.mesh, folder):
        lost = what_is_lost(view.optimizer)
        if lost is not None:
            raise UnsupportedError(lost)
        pieces, numbers = state_pieces(view, place)
        owned = [[n for n in group if place.owns(holdings.ledger.entries[n])] for group in view.group_names]
        if wire is not None:
            pieces += wire_pieces(wire, place)
        if replicas is not None and replicas.local is not None:
            pieces += outer_pieces(replicas.local, place)
        if holdings.versions is not None:
            pieces += older_pieces(holdings.versions.older(), place)
    shape = holdings.mesh.shape
    labels = sorted({piece.label for piece in pieces})
    gathered: list[dict[str, Any]] = everyone({"numbers": numbers, "tensors": labels})
    names = [entry.name for entry in holdings.ledger if entry.kind == "param"]
    groups = groups_together(optimizer, owned, names)
    description = {
        "format": FORMAT,
        "mesh": shape.sizes,
        "optimizer": type(optimizer).__name__,
        "groups": groups.saved,
        "replicas": shape.dp_size if holdings.has_local_steps else None,
        "wire": None if wire is None else {"method": method_of(holdings.compression), "dp_size": shape.dp_size},
        "dropout_step": dropout_step,
        "parameters": names,
        "tensors": sorted({label for each in gathered for label in each["tensors"]}),
        "numbers": {label: value for each in gathered for label, value in each["numbers"].items()},
    }
    return Snapshot(pieces, description, groups)


def write_snapshot(folder: Path, taken: Snapshot, mesh: Mesh, group: dist.ProcessGroup | None = None) -> None:
    """Write what `snapshot` collected; every rank of the group calls it.

    Raises:
        CheckpointError: A rank could not write; the same text on all.
    """
    with together(mesh, folder, group):
        save_pieces(folder / TENSORS, taken.pieces, group)
        if mesh.rank == 0:
            (folder / DESCRIPTION).write_text(json.dumps(taken.description))


@dataclass(frozen=True)
class Resumed:
    """Facts of a loaded state that the caller has to act on.

    Args:
        order: For each group of the optimizer, which saved one it is.
        dropout_step: Step with which the masks of a pipeline go on; None if there was none.
    """

    order: list[int]
    dropout_step: int | None


def load_training_state(folder: Path, holdings: Holdings, optimizer: torch.optim.Optimizer) -> Resumed:
    """Put what a checkpoint holds into the optimizer and the replicas of this rank; no other rank is waited for.

    Raises:
        CheckpointError: Something is missing, damaged, or of another model or other settings.
    """
    description = read_description(folder)
    if description["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{folder / DESCRIPTION}: the state is that of {description['optimizer']}, this run uses "
            f"{type(optimizer).__name__}. Resume with the optimizer it was saved with."
        )
    _check_parameters(folder, description["parameters"], holdings.ledger)
    index = TensorIndex(folder / TENSORS)
    missing = sorted(set(description["tensors"]) - index.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{folder / TENSORS / INDEX} has no tensor {missing[0]} ({len(missing)} are missing), which {DESCRIPTION} lists: "
            "it is damaged."
        )
    place = holdings.place_in(description["replicas"])
    saved = SavedState(index, description["numbers"], place)
    groups = [{key: decode(value) for key, value in group.items()} for group in description["groups"]]
    order = restore(holdings.view(optimizer), saved, groups)
    _load_replicas(description, index, holdings, place)
    if holdings.versions is not None:
        _load_versions(index, holdings, holdings.versions, place)
    return Resumed(order, description["dropout_step"])


def _check_parameters(folder: Path, saved: Sequence[str] | None, ledger: Ledger) -> None:
    """Refuse a state of other parameters: those that this model has not would be left out without a word.

    Raises:
        CheckpointError: Names the first that only one of the two has.
    """
    here = {entry.name for entry in ledger if entry.kind == "param"}
    odd = sorted(here.symmetric_difference(here if saved is None else saved))
    if odd:
        has, lacks = (
            ("this run's model", "the checkpoint's") if odd[0] in here else ("the checkpoint's model", "this run's")
        )
        raise CheckpointError(
            f"{folder / DESCRIPTION}: {has} has a parameter {odd[0]} and {lacks} has none of that name ({len(odd)} differ; of tied "
            "parameters the first name counts). Build the model that the checkpoint was saved of."
        )


def _load_replicas(description: Mapping[str, Any], index: TensorIndex, holdings: Holdings, place: Place) -> None:
    replicas, names = holdings.replicas, list(holdings.parameters)
    wire = replicas.wire if replicas is not None and keeps_debt(holdings.compression) else None
    if wire is not None:
        restore_wire(wire, index, description["wire"], holdings.compression, names, place)
    elif description["wire"] is not None and holdings.mesh.rank == 0:
        logger.warning(
            "hf_parallel: %s holds residuals of gradient compression that this run does not use: gradients that were "
            "not sent yet are lost.",
            index.folder,
        )
    if replicas is not None and replicas.local is not None:
        restore_outer(replicas.local, index, names, place)


def _load_versions(index: TensorIndex, holdings: Holdings, versions: Versions, place: Place) -> None:
    wanted = versions.older()
    older = restore_older(index, wanted[0], len(wanted), place) if wanted else []
    if not all(everyone(len(older) == len(wanted))):  # then on no rank, so that stages begin alike
        older = []
        if holdings.mesh.rank == 0:
            logger.warning(
                "hf_parallel: %s has no weights of %d updates before it, which this run's pipeline.schedule begins the next windows "
                "with: they begin with the newest.",
                index.folder,
                len(wanted),
            )
    versions.restore(older)


def rng_source(saved: MeshShape, here: Mesh) -> int:
    """Choose the rank whose random state this one takes up: its own in the same layout, else the first of a saved copy.

    All ranks of a model copy draw alike, so under another layout they take one state, and copies stay different.
    """
    if saved == here.shape:
        return here.rank
    return saved.rank_at(here.dp_rank % saved.dp_size, 0, 0)
