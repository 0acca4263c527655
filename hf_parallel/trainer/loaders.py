"""Data loaders of a parallel run: sharded over the replicas, so that all ranks of a model copy read the same rows."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderStateMixin, prepare_data_loader
from accelerate.utils import slice_tensors
from transformers.trainer_utils import seed_worker

from hf_parallel.engine.session import Session
from hf_parallel.errors import ConfigError
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.mesh.groups import Mesh
from hf_parallel.trainer.stream_rows import count_rows


@dataclass
class Place:
    """The part of accelerate's `PartialState` that splitting of inputs reads."""

    num_processes: int
    process_index: int
    device: torch.device


def shard_over_replicas(
    loader: Any, accelerator: Accelerator, session: Session, *, device_placement: bool, slice_fn_for_dispatch: Any
) -> Any:
    """A loader as accelerate prepares it, with a replica in the place of a process.

    Args:
        loader: The loader of the user or the Trainer.
        accelerator: Accelerator, whose settings of loaders count.
        session: The run.
        device_placement: Whether batches are put on the accelerator's device.
        slice_fn_for_dispatch: Cuts what rank 0 reads for all; None for accelerate's own.

    Raises:
        ConfigError: `dispatch_batches=True` in a Trainer with tp or pp, or replicas would get unequal numbers of batches.
    """
    mesh, start = session.mesh, loader.worker_init_fn
    if isinstance(start, functools.partial) and start.func is seed_worker:
        # A Trainer seeds workers by rank, and those of a model copy would draw other numbers.
        loader.worker_init_fn = functools.partial(start, rank=mesh.dp_rank)
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=mesh.shape.dp_size,
        process_index=mesh.dp_rank,
        split_batches=accelerator.split_batches,
        put_on_device=device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=_dispatches(accelerator.dispatch_batches, session),
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    refuse_unequal(prepared, mesh.shape.dp_size)
    return count_rows(dispatch_to_replicas(prepared, mesh))


def _dispatches(wanted: bool | None, session: Session) -> bool | None:
    """Whether rank 0 reads for all; None as stock: if the data set is iterable.

    A Trainer pads each batch to its own length, and what rank 0 dispatches must be of one length: there unset means no.
    """
    if session.raw_loop:
        return None if wanted is None else bool(wanted)
    if wanted and session.config.model_parallel_size > 1:
        raise ConfigError(
            "dispatch_batches=True in a Trainer with pp_size or tp_size above 1: skipping batches when it resumes would "
            "give every rank other rows. Leave dispatch_batches unset."
        )
    return bool(wanted)


def tell_epochs(loader: Any, watchdog: Watchdog) -> Any:
    """Let a loader tell the watchdog when it begins an epoch: its first batch may take longer than those of steps."""
    if isinstance(loader, DataLoaderStateMixin):
        begin = loader.begin

        def begins() -> None:
            watchdog.begins_epoch()
            begin()

        loader.begin = begins
    return loader


def dispatch_to_replicas(loader: Any, mesh: Mesh) -> Any:
    """Let a loader that rank 0 reads for all (`dispatch_batches`) give the ranks of a model copy the same rows.

    Args:
        loader: Any loader; others than `DataLoaderDispatcher` stay as they are.
        mesh: This rank's mesh.

    Returns:
        The loader.
    """
    if not isinstance(loader, DataLoaderDispatcher):
        return loader
    cut = slice_tensors if loader.slice_fn is None else loader.slice_fn

    def slice_of_replica(data: Any, part: slice, *args: Any, **kwargs: Any) -> Any:
        if part.start:  # that of rank x; the first rows, which fill up a last batch, are the same for all
            rows = part.stop - part.start
            part = slice(mesh.dp_rank * rows, (mesh.dp_rank + 1) * rows)
        return cut(data, part, *args, **kwargs)

    # Rank 0 alone reads, so ranks keep their numbers; what is read and split is counted in replicas.
    loader.state = Place(mesh.shape.dp_size, mesh.rank, loader.state.device)
    loader.slice_fn = slice_of_replica
    return loader


def refuse_unequal(loader: Any, dp_size: int) -> None:
    """Refuse a loader of which some replicas would get more batches than others.

    Raises:
        ConfigError: `even_batches` is off, and the rows do not divide.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if dp_size == 1 or not isinstance(sampler, BatchSamplerShard) or sampler.even_batches:
        return
    counts = []
    for replica in range(dp_size):
        other = copy.copy(sampler)
        other.process_index = replica
        counts.append(len(other))
    if len(set(counts)) > 1:
        raise ConfigError(
            f"even_batches=False: the {dp_size} replicas would get {counts} batches, and those with more would wait for the "
            "others. Leave even_batches True, which fills up the last batches, or make the DataLoader with drop_last=True."
        )
