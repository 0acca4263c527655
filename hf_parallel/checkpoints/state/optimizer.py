"""Optimizer state by parameter name, as pieces of whole tensors: what is saved does not depend on who held what.

State with one entry an element has the shape of its parameter and goes into DCP. What is one number for a parameter
(`step`) goes into the description, which is JSON. Other tensors (the row and column means of Adafactor) are statistics
of the tensor they were made from: of a tensor-parallel shard they fit that shard only, and say so in their label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.checkpoints.state.pieces import Piece, is_writer, pieces_of
from hf_parallel.data_parallel.flat import FlatShard, is_per_element
from hf_parallel.data_parallel.fsdp_parts import first_row_of, is_part, local_of
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh.groups import Mesh


SEPARATOR = "::"
PREFIX = f"optimizer{SEPARATOR}"
WHOLE = "@whole"
MASTER_WEIGHT = "master_weight"  # the fp32 copy of a parameter that is in half precision
MISSED_BY_USER = "missed_by_user"  # of a parameter that took fewer steps than others of its flat part (see `Missed`)


@dataclass(frozen=True)
class Place:
    """The place of a rank among those that hold the same optimizer state.

    Args:
        ledger: The model's ledger.
        mesh: This rank's mesh.
        replica: Replica to which a state belongs that each replica has for itself; None for a state that all share.
        copy: Index of this rank among the ranks with the same elements.
        copies: Number of ranks with the same elements.
    """

    ledger: Ledger
    mesh: Mesh
    replica: int | None = None
    copy: int = 0
    copies: int = 1

    def label(self, name: str, key: str) -> str:
        """Name of a state tensor in the checkpoint."""
        return f"{PREFIX}{name}{SEPARATOR}{key}{self.suffix}"

    @property
    def suffix(self) -> str:
        """The end of a name that marks the state of one replica."""
        return "" if self.replica is None else f"@dp{self.replica}"

    def shard_mark(self, entry: Entry) -> str:
        """The mark in the name of a tensor that is not in the shape of its parameter: from which shard it was made."""
        parts, axis = self.mesh.parts, "ep" if self.mesh.shape.ep_size > 1 else "tp"
        return WHOLE if entry.spec is None or parts.size == 1 else f"@{axis}{parts.rank}of{parts.size}"

    def writes(self, label: str, mark: str) -> bool:
        """Whether this rank writes such a tensor."""
        return is_writer(label, self.copy, self.copies) and (mark != WHOLE or self.mesh.tp_rank == 0)

    def writes_elements(self, label: str, entry: Entry) -> bool:
        """Whether this rank writes the elements that it has of a state; replicas that share experts have others of them."""
        shared = self.mesh.shape.ep_size if entry.spec is not None and self.copies > 1 else 1
        return is_writer(label, self.copy // shared, self.copies // shared)

    def owns(self, entry: Entry) -> bool:
        """Whether this stage writes what belongs to a parameter."""
        return entry.owner == self.mesh.pp_rank


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer, and how its parameters are laid out on this rank.

    Args:
        optimizer: The optimizer.
        parameters: Ledger name -> this rank's parameter.
        zero: Its partition, None without one.
        has_copies: Whether parameters that are sharded are fp32 copies, which are then part of the state.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    zero: ZeroPartition | None = None
    has_copies: bool = False

    @property
    def group_names(self) -> list[list[str]]:
        """Names of the parameters in each group.

        Raises:
            CheckpointError: The optimizer updates a tensor that is not a parameter of the model.
        """
        if self.zero is not None:
            return [list(group) for group in self.zero.groups]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        found = [[names.get(id(p), "") for p in group["params"]] for group in self.optimizer.param_groups]
        if any("" in group for group in found):
            raise CheckpointError(
                f"{type(self.optimizer).__name__} updates a tensor that is no parameter of the model: its state has no "
                "name to be saved by. Put parameters of the model into the optimizer only."
            )
        return found

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer updates on this rank."""
        wanted = {name for group in self.group_names for name in group}
        return ((name, parameter) for name, parameter in self.parameters.items() if name in wanted)


@dataclass(frozen=True)
class Elements:
    """State of a run of elements of one parameter.

    Args:
        name: Name of the parameter.
        start: Position of the first element in this rank's tensor-parallel shard.
        state: Key -> the elements f[n].
        others: Key -> what is not one entry an element.
    """

    name: str
    start: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def elements_of(view: OptimizerView) -> Iterator[Elements]:
    """All state on this rank; tensors are views where memory allows."""
    if view.zero is not None:
        for shard in view.zero.shards:
            yield from _of_flat(view.zero, shard)
        return
    for name, parameter in view.trained():
        state = dict(view.optimizer.state.get(parameter, {}))
        if view.has_copies and is_part(parameter):
            state[MASTER_WEIGHT] = parameter
        start = first_row_of(parameter) * parameter.shape[1:].numel()
        flat = {
            key: local_of(value).detach().contiguous().view(-1)
            for key, value in state.items()
            if is_per_element(value, key, parameter)
        }
        yield Elements(name, start, flat, {key: value for key, value in state.items() if key not in flat})


def _of_flat(zero: ZeroPartition, shard: FlatShard) -> Iterator[Elements]:
    state = dict(zero.optimizer.state.get(shard.master, {}))
    if shard.is_finer:
        state[MASTER_WEIGHT] = shard.master.detach()
    flat = {key: value for key, value in state.items() if is_per_element(value, key, shard.master)}
    shared = {key: value for key, value in state.items() if key not in flat}
    for position, name in enumerate(shard.bucket.names):
        others = zero.counts.of(name, shared)
        mine = flat if others or not shared else {key: flat[key] for key in flat.keys() & {MASTER_WEIGHT}}
        if name in zero.counts.missed:
            others = {**others, MISSED_BY_USER: zero.counts.missed[name].by_user}
        piece = shard.inside(position)
        if piece is None:
            yield Elements(name, others=others)
        else:
            yield Elements(name, start_in(shard, position, piece), {k: v[piece] for k, v in mine.items()}, others)


def start_in(shard: FlatShard, position: int, piece: slice) -> int:
    """Position in a parameter of the first element of its piece of a flat part."""
    return int(shard.start + piece.start - shard.bucket.offsets[position])


def state_pieces(view: OptimizerView, place: Place) -> tuple[list[Piece], dict[str, Any]]:
    """Collect the part of the optimizer's state that this rank writes: pieces, and numbers by label."""
    pieces: list[Piece] = []
    numbers: dict[str, Any] = {}
    for held in elements_of(view):
        entry = place.ledger.entries[held.name]
        if not place.owns(entry):
            continue
        for key, run in held.state.items():
            label = place.label(held.name, key)
            if place.writes_elements(label, entry):
                pieces += pieces_of(label, entry, place.mesh, run, held.start, counted_only=True)
        for key, value in held.others.items():
            _add_other(pieces, numbers, place, entry, key, value)
    return pieces, numbers


def _add_other(
    pieces: list[Piece], numbers: dict[str, Any], place: Place, entry: Entry, key: str, value: object
) -> None:
    label = place.label(entry.name, key)
    if isinstance(value, Tensor) and value.numel() > 1:
        value = local_of(value).detach()
        mark = place.shard_mark(entry)
        if place.writes(label, mark):
            pieces.append(Piece(label + mark, tuple(value.shape), (0,) * value.ndim, value))
    elif place.mesh.tp_rank == 0 and place.copy == 0:
        numbers[label] = encode(value)


def encode(value: object) -> Any:
    """A number, or a tensor of one, as JSON."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.tolist()}
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict) and value.keys() == {"dtype", "value"}:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the training state has a number of type {value['dtype']!r:.60}: it is damaged.")
        return torch.tensor(value["value"], dtype=dtype)
    return value
