"""Optimizer state out of a checkpoint, whatever layout it was saved under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_parallel.checkpoints.state.dcp import TensorIndex
from hf_parallel.checkpoints.state.groups import OWN, match_groups
from hf_parallel.checkpoints.state.optimizer import (
    MASTER_WEIGHT,
    MISSED_BY_USER,
    PREFIX,
    SEPARATOR,
    OptimizerView,
    Place,
    decode,
    start_in,
)
from hf_parallel.checkpoints.state.pieces import Piece, pieces_of
from hf_parallel.data_parallel.flat import FlatShard, is_per_element
from hf_parallel.data_parallel.fsdp_parts import first_row_of, is_part, local_of, part_like
from hf_parallel.data_parallel.shared_counts import COUNT, Missed
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import CheckpointError


class SavedState:
    """The optimizer state of a checkpoint, from one rank's place.

    Args:
        index: Index of the checkpoint's tensors.
        numbers: Label -> what is one number for a parameter.
        place: Position of this rank now.
    """

    def __init__(self, index: TensorIndex, numbers: Mapping[str, Any], place: Place) -> None:
        self.index, self.place = index, place
        self._keys: dict[str, dict[str, torch.dtype]] = {}
        self._numbers: dict[str, dict[str, Any]] = {}
        for label, (_, dtype) in index.tensors.items():
            self._note(self._keys, label, dtype)
        for label, value in numbers.items():
            self._note(self._numbers, label, decode(value))

    def _note(self, found: dict[str, dict[str, Any]], label: str, value: object) -> None:
        if not label.startswith(PREFIX):
            return
        name, key = label.removeprefix(PREFIX).rsplit(SEPARATOR, 1)
        key, of_replica, rest = key.partition("@dp")
        replica, of_shard, shard = rest.partition("@")
        if f"{of_replica}{replica}" == self.place.suffix:
            found.setdefault(name, {})[f"{key}{of_shard}{shard}"] = value

    def tensors(self, name: str) -> dict[str, torch.dtype]:
        """Keys and dtypes of a parameter's state with one entry an element."""
        return {key: dtype for key, dtype in self._keys.get(name, {}).items() if "@" not in key}

    def numbers(self, name: str) -> dict[str, Any]:
        """The entries of a parameter's state that are one number."""
        return {key: value for key, value in self._numbers.get(name, {}).items() if key != MISSED_BY_USER}

    def missed_by_user(self, name: str) -> bool | None:
        """Whether a parameter took fewer steps than others of its flat part because user code wanted that; None if it did not."""
        return self._numbers.get(name, {}).get(MISSED_BY_USER)

    def others(self, name: str) -> tuple[dict[str, Tensor], list[Piece]]:
        """Tensors of other shapes than the parameter's, to be filled, and the pieces that fill them.

        Raises:
            CheckpointError: They are of shards that this rank does not hold now.
        """
        entry = self.place.ledger.entries[name]
        found: dict[str, Tensor] = {}
        pieces: list[Piece] = []
        mark = self.place.shard_mark(entry)
        for key, dtype in self._keys.get(name, {}).items():
            plain, of_shard, _ = key.partition("@")
            if not of_shard:
                continue
            label = self.place.label(name, plain) + mark
            if label not in self.index.tensors:
                raise CheckpointError(
                    f"{self.index.folder}: {plain} of {name} is a statistic of another tensor-parallel shard ({key}). "
                    "Resume with the tp_size it was saved with, or use an optimizer that updates every element independently."
                )
            shape = self.index.tensors[label][0]
            found[plain] = torch.zeros(shape, dtype=dtype)
            pieces = [piece for piece in pieces if piece.label != label]
            pieces.append(Piece(label, shape, (0,) * len(shape), found[plain]))
        return found, pieces


def restore(view: OptimizerView, saved: SavedState, groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Put the state of a checkpoint into an optimizer, whatever layout it was saved under.

    Returns:
        For each group of the optimizer, which saved one it is (see `match_groups`).

    Raises:
        CheckpointError: Parameters are grouped in another way, or a tensor is missing or damaged.
    """
    order = match_groups(groups, view)
    here = view.optimizer.param_groups if view.zero is None else view.zero.optimizer.param_groups
    chosen = [groups[index] if index != OWN else own for index, own in zip(order, here, strict=True)]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in chosen]
    if view.zero is not None:
        _restore_flat(view.zero, saved, settings)
    else:
        _restore_plain(view, saved, settings)
    return order


def _restore_plain(view: OptimizerView, saved: SavedState, settings: Sequence[Mapping[str, Any]]) -> None:
    place = saved.place
    states: dict[str, dict[str, Any]] = {}
    pieces: list[Piece] = []
    for name, parameter in view.trained():
        entry, local = place.ledger.entries[name], local_of(parameter)
        start = first_row_of(parameter) * parameter.shape[1:].numel()
        state: dict[str, Any] = saved.numbers(name)
        for key, dtype in saved.tensors(name).items():
            if key == MASTER_WEIGHT and not (view.has_copies and is_part(parameter)):
                continue
            run = torch.zeros(local.numel(), dtype=dtype)
            pieces += pieces_of(place.label(name, key), entry, place.mesh, run, start)
            state[key] = run.view(local.shape)
        others, more = saved.others(name)
        pieces += more
        if state or others:
            states[name] = {**state, **others}
    saved.index.read(pieces)
    _put_plain(view, states, settings)


@torch.no_grad()
def _put_plain(view: OptimizerView, states: dict[str, dict[str, Any]], settings: Sequence[Mapping[str, Any]]) -> None:
    members = view.group_names
    order = {name: position for position, name in enumerate(name for group in members for name in group)}
    packed = {}
    for name, state in states.items():
        parameter = view.parameters[name]
        local = local_of(parameter)
        if MASTER_WEIGHT in state:
            local.copy_(state.pop(MASTER_WEIGHT))
        packed[order[name]] = {
            key: part_like(parameter, value) if is_per_element(value, key, local) else value
            for key, value in state.items()
        }
    groups = [
        {**each, "params": [order[name] for name in group]} for each, group in zip(settings, members, strict=True)
    ]
    view.optimizer.load_state_dict({"state": packed, "param_groups": groups})


@torch.no_grad()
def _restore_flat(zero: ZeroPartition, saved: SavedState, settings: Sequence[Mapping[str, Any]]) -> None:
    zero.refresh()
    order = [shard for index in range(len(settings)) for shard in zero.shards if shard.group == index]
    packed: dict[int, dict[str, Any]] = {}
    masters: list[tuple[FlatShard, Tensor]] = []
    pieces: list[Piece] = []
    zero.counts.missed = {}
    for position, shard in enumerate(order):
        state, missed = _shared_numbers(shard, saved)
        zero.counts.missed |= missed
        pieces += _flat_targets(shard, saved, state)
        if MASTER_WEIGHT in state:
            masters.append((shard, state.pop(MASTER_WEIGHT)))
        if state:
            packed[position] = state
    saved.index.read(pieces)
    for shard, master in masters:
        shard.master.copy_(master)
    zero.note()
    positions = {id(shard.master): position for position, shard in enumerate(order)}
    groups = [
        {**each, "params": [positions[id(param)] for param in group["params"]]}
        for each, group in zip(settings, zero.optimizer.param_groups, strict=True)
    ]
    zero.optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _shared_numbers(shard: FlatShard, saved: SavedState) -> tuple[dict[str, Any], dict[str, Missed]]:
    """The state of a flat part that is one number, and which of its parameters took fewer steps.

    Raises:
        CheckpointError: Its parameters have unequal numbers, and nobody knows why.
    """
    found = {name: saved.numbers(name) for name in shard.bucket.names}
    taken = {name: float(numbers.get(COUNT, 0)) for name, numbers in found.items()}
    most = max(taken.values())
    missed: dict[str, Missed] = {}
    state: dict[str, Any] = {}
    for name, numbers in found.items():
        by_user = saved.missed_by_user(name)
        if taken[name] < most and (by_user is not None or not taken[name]):
            missed[name] = Missed(int(most - taken[name]), by_user is not False)
            continue
        for key, value in numbers.items():
            if state.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{saved.index.folder}: the optimizer state {key} is {float(value):g} for {name} and {float(state[key]):g} for "
                    "other parameters (it was unfrozen later, or had no gradient in some steps). With native ZeRO the parameters of "
                    "a flat part share one number. Resume with zero.stage 0 or 3."
                )
    return state, missed


def _flat_targets(shard: FlatShard, saved: SavedState, state: dict[str, Any]) -> list[Piece]:
    """Add tensors to the state of a flat part, and give the pieces that fill them."""
    place = saved.place
    pieces: list[Piece] = []
    for position, name in enumerate(shard.bucket.names):
        for key, dtype in saved.tensors(name).items():
            if key == MASTER_WEIGHT and not shard.is_finer:
                continue
            if key not in state:
                empty = torch.zeros(shard.master.shape, dtype=dtype)
                # Parameters without a saved fp32 copy keep the one made of their weights.
                state[key] = shard.master.detach().cpu().clone() if key == MASTER_WEIGHT else empty
            piece = shard.inside(position)
            if piece is not None:
                start = start_in(shard, position, piece)
                entry = place.ledger.entries[name]
                pieces += pieces_of(place.label(name, key), entry, place.mesh, state[key][piece], start)
        if set(saved.others(name)[0]):
            raise CheckpointError(
                f"{saved.index.folder}: the optimizer state of {name} is not one entry an element "
                f"({', '.join(saved.others(name)[0])}): native ZeRO cannot load it. Set zero.stage to 0."
            )
    return pieces
