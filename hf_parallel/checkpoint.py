"""Tensors of a parallelized model to and from files, by the ledger.

Weights are written as one normal Hugging Face checkpoint: the writer receives every tensor whole, in ledger order.
Each rank reads back only what it holds. Optimizer state is a safetensors file per (stage, tp rank), keyed by parameter
name, whether it was partitioned over the replicas or not. A directory appears under its final name only when everything in it is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from hf_parallel.data_parallel.fsdp import is_part, local_of, rows_of, split_state, whole_of
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.data_parallel.zero_state import MASTER_WEIGHT, collect_state, restore_state
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh import Mesh


WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
STATE_SEPARATOR = "::"


def gather_tensors(
    ledger: Ledger, held: Mapping[str, torch.Tensor], mesh: Mesh, *, wanted: Callable[[Entry], bool] | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor of the full model, whole and on the CPU, on world rank 0; {} elsewhere. Collective.

    Args:
        ledger: The model's ledger.
        held: Ledger name -> this rank's tensor or shard.
        mesh: This rank's mesh.
        wanted: Entries to gather; all by default.
    """
    full: dict[str, torch.Tensor] = {}
    for entry in ledger:
        if wanted is None or wanted(entry):
            mine = held.get(entry.name)
            mine = mine if mine is None else whole_of(mine)  # over the replicas, one tensor at a time
            tensor = _gather_one(entry, mine, mesh) if mesh.dp_rank == 0 else None
            if tensor is not None:
                full[entry.name] = tensor
    return full


def _gather_one(entry: Entry, mine: torch.Tensor | None, mesh: Mesh) -> torch.Tensor | None:
    """The whole tensor on world rank 0, None elsewhere; the owner stage's tp ranks send their shards."""
    tp_size = mesh.shape.tp_size if entry.spec is not None else 1
    sources = [mesh.shape.rank_at(0, entry.owner, tp_rank) for tp_rank in range(tp_size)]
    if mesh.rank in sources and mesh.rank != 0:
        if mine is None:
            raise CheckpointError(f"{entry.name} is owned by {mesh.describe()} but is not here.")
        dist.send(_wire(mine.detach().to(entry.dtype)), dst=0)
    if mesh.rank != 0:
        return None
    shards = []
    for tp_rank, source in enumerate(sources):
        if source == 0:
            if mine is None:
                raise CheckpointError(f"{entry.name} is owned by {mesh.describe()} but is not here.")
            shards.append(mine.detach().to("cpu", entry.dtype))
            continue
        shape = list(entry.shape)
        if entry.spec is not None:
            shape[entry.spec.dim] = entry.spec.local_size(tp_size, tp_rank)
        buffer = _wire(torch.empty(shape, dtype=entry.dtype))
        dist.recv(buffer, src=source)
        shards.append(buffer.cpu())
    whole = shards[0] if entry.spec is None else entry.spec.assemble(shards)
    return whole.clone() if whole.data_ptr() == (mine.data_ptr() if mine is not None else 0) else whole


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where the default group can send it from: the GPU for NCCL, the CPU for gloo; contiguous."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    return tensor.to(device).contiguous()


@torch.no_grad()
def load_weights(folder: str | Path, ledger: Ledger, held: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Copy this rank's tensors out of a Hugging Face checkpoint, reading only its own slices.

    Raises:
        CheckpointError: No weights in the folder, an unreadable file, or a tensor that is missing or of another shape.
    """
    files = weight_files(Path(folder))
    for name, tensor in held.items():
        entry = ledger.entries[name]
        alias = next((alias for alias in entry.aliases if alias in files), None)
        if alias is None:
            raise CheckpointError(
                f"{folder}: no tensor named {' or '.join(entry.aliases)} among {len(files)}. The checkpoint is of "
                "another model, or its names are converted when transformers loads it: load it with from_pretrained()."
            )
        local_of(tensor).copy_(rows_of(tensor, _read(files[alias], alias, entry, mesh)))


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that has it.

    Raises:
        CheckpointError: The folder has neither weights nor an index, or a file of the index is missing.
    """
    index, single = folder / WEIGHTS_INDEX, folder / WEIGHTS
    if index.is_file():
        try:
            files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}. It is truncated or damaged.") from error
        missing = sorted({str(path) for path in files.values() if not path.is_file()})
        if missing:
            raise CheckpointError(f"{index} names files that do not exist: {', '.join(missing)}.")
        return files
    if not single.is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS} and no {WEIGHTS_INDEX}: it is not a complete checkpoint.")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise CheckpointError(f"{single} cannot be read: {error}. It is truncated or damaged.") from error


def _read(path: Path, name: str, entry: Entry, mesh: Mesh) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            if shape != entry.shape:
                raise CheckpointError(f"{path}: {name} has shape {shape}, the model needs {entry.shape}.")
            spec = entry.spec
            if spec is None:
                whole: torch.Tensor = file.get_tensor(name)
                return whole
            held = [piece for piece in spec.ranges(mesh.shape.tp_size, mesh.tp_rank) if piece[1]]
            before = (slice(None),) * spec.dim
            return torch.cat([view[(*before, slice(s, s + n))] for s, n in held], dim=spec.dim)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}. The file is truncated or damaged.") from error


def optimizer_file(folder: str | Path, mesh: Mesh, *, replica: int | None = None) -> Path:
    """Where the optimizer state of this rank's (stage, tp rank) lives; `replica` if each replica has its own."""
    of_replica = "" if replica is None else f"-dp{replica}"
    return Path(folder) / f"optimizer-stage{mesh.pp_rank}-tp{mesh.tp_rank}{of_replica}.safetensors"


def save_optimizer(
    folder: str | Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    zero: ZeroPartition | None = None,
    replica: int | None = None,
    *,
    has_copies: bool = False,
) -> None:
    """Write the optimizer state of this rank's (stage, tp rank), by parameter name.

    Collective over the replicas that share the state, if it is partitioned: each call needs all of them.

    Args:
        folder: The checkpoint.
        optimizer: The optimizer.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        zero: Its partition; then rank 0 of dp writes.
        replica: This rank's replica, if each has a state of its own; None: the rank of dp 0 writes that of all.
        has_copies: Whether parameters that are shared out are fp32 copies, which are then part of the state.
    """
    if zero is not None and mesh.dp_rank >= zero.shard_group.size():
        return
    states = collect_state(zero) if zero is not None else _states_by_name(optimizer, parameters)
    if zero is None and any(is_part(parameter) for parameter in parameters.values()):
        copies = {name: {MASTER_WEIGHT: p} for name, p in parameters.items() if has_copies and p.requires_grad}
        states = _whole_states({name: {**states[name], **copies.get(name, {})} for name in states}, mesh)
    if mesh.dp_rank != 0 and replica is None:
        return
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, state in states.items():
        for key, value in state.items():
            label = f"{name}{STATE_SEPARATOR}{key}"
            if isinstance(value, torch.Tensor):
                tensors[label] = value.detach().cpu().contiguous().clone()
            else:
                scalars[label] = value
    members = _group_names(optimizer, parameters, zero)
    groups = [{**group, "params": names} for group, names in zip(optimizer.param_groups, members, strict=True)]
    layout = {"pp_size": mesh.shape.pp_size, "tp_size": mesh.shape.tp_size}
    description = {"layout": layout, "groups": groups, "scalars": scalars, "optimizer": type(optimizer).__name__}
    save_file(
        tensors, optimizer_file(folder, mesh, replica=replica), metadata={"hf_parallel": json.dumps(description)}
    )


def _states_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Mapping[str, Any]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def _whole_states(states: Mapping[str, Mapping[str, Any]], mesh: Mesh) -> dict[str, dict[str, Any]]:
    """State of parameters that are shared out, whole and on the CPU, on dp rank 0; {} elsewhere. Collective over dp."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(states):
        for key, value in sorted(states[name].items()):
            whole = whole_of(value).cpu() if isinstance(value, torch.Tensor) else value
            if mesh.dp_rank == 0:
                found.setdefault(name, {})[key] = whole
    return found


def _group_names(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], zero: ZeroPartition | None
) -> list[list[str | None]]:
    """Names of the parameters in each group; None for one that this rank does not know."""
    if zero is not None:
        return [list(group) for group in zero.groups]
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(
    folder: str | Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    zero: ZeroPartition | None = None,
    replica: int | None = None,
) -> None:
    """Read back what `save_optimizer` wrote for this rank's (stage, tp rank), partitioned now as then or not.

    Raises:
        CheckpointError: No such file, another layout, another optimizer, or other parameter groups.
    """
    path = optimizer_file(folder, mesh, replica=replica)
    if not path.is_file():
        of_replica = "" if replica is None else ", with fewer replicas or without local_sgd"
        raise CheckpointError(
            f"{path} does not exist: the checkpoint was saved with another pp_size or tp_size{of_replica}, or without "
            "optimizer state. Resume with the layout it was saved with, or start a new run from its weights."
        )
    description, tensors = _read_optimizer(path)
    _check_optimizer(path, description, optimizer, _group_names(optimizer, parameters, zero), mesh)
    states: dict[str, dict[str, Any]] = {}
    for label, value in [*tensors.items(), *description["scalars"].items()]:
        name, key = label.rsplit(STATE_SEPARATOR, 1)
        states.setdefault(name, {})[key] = value
    settings = [{key: value for key, value in group.items() if key != "params"} for group in description["groups"]]
    if zero is not None:
        restore_state(zero, states, settings)
        return
    for name, state in states.items():
        if MASTER_WEIGHT in state and is_part(parameters[name]):
            with torch.no_grad():
                local_of(parameters[name]).copy_(rows_of(parameters[name], state[MASTER_WEIGHT]))
    order = [name for group in description["groups"] for name in group["params"]]
    index = {name: position for position, name in enumerate(order)}
    kept = {
        index[name]: split_state(parameters[name], {k: v for k, v in state.items() if k != MASTER_WEIGHT})
        for name, state in states.items()
    }
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in description["groups"]]
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


def _read_optimizer(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {label: file.get_tensor(label) for label in file.keys()}  # noqa: SIM118  not a dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. It is truncated or damaged.") from error
    if "hf_parallel" not in metadata:
        raise CheckpointError(f"{path} has no description: it was not written by hf_parallel. Resume without it.")
    return json.loads(metadata["hf_parallel"]), tensors


def _check_optimizer(
    path: Path,
    description: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str | None]],
    mesh: Mesh,
) -> None:
    saved, here = description["layout"], {"pp_size": mesh.shape.pp_size, "tp_size": mesh.shape.tp_size}
    if saved != here:
        raise CheckpointError(f"{path} was saved with {saved}, this run has {here}. Resume with the saved layout.")
    if [group["params"] for group in description["groups"]] != groups:
        raise CheckpointError(
            f"{path} has other parameter groups than this run's {type(optimizer).__name__}: the cut, the frozen "
            "parameters or the weight-decay rule changed. Resume with the settings it was saved with."
        )
    if description["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{path} holds the state of {description['optimizer']}, this run uses {type(optimizer).__name__}."
        )


def publish(staged: Path, final: Path) -> None:
    """Give a finished folder its final name, atomically; what was there before stays until the new one is in place."""
    for path in [*staged.rglob("*"), staged]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    old = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        staged.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
