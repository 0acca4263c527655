"""Messages between ranks before a mesh exists: their machines, the links between them, the settings they have read."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence

import torch.distributed as dist

from hf_parallel.errors import RankMismatchError
from hf_parallel.mesh.links import Links


logger = logging.getLogger(__name__)


def ranks_per_node() -> int:
    """Ranks that the launcher started on each node; all of them if it does not say."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def links_here(links_of: Callable[[int, int], Links]) -> Links:
    """The links of this run; collective over the default group.

    Args:
        links_of: Makes them of the number of ranks and that of each machine: of all where machines have different ones, or where
            the ranks of a machine are not numbered one after the other, which is said.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    own = ranks_per_node(), int(os.environ.get("LOCAL_RANK", -1))
    found = [own] * world_size
    if world_size > 1:
        dist.all_gather_object(found, own)
    count = own[0]
    even = world_size % count == 0 and all(other == count for other, _ in found)
    apart = _apart([place for _, place in found], count) if even else []
    if apart and dist.get_rank() == 0:
        logger.warning(
            "hf_parallel: rank %d is number %d of the %d ranks of its machine: ranks of a machine are not numbered one after the "
            "other, so neighbours, which share layers and sums, lie on several machines. Start them in blocks (srun "
            "--distribution=block, mpirun --map-by slot, or torchrun on each machine).",
            apart[0],
            found[apart[0]][1],
            count,
        )
    return links_of(world_size, count if even and not apart else world_size)


def _apart(places: Sequence[int], count: int) -> list[int]:
    """Ranks whose place on their machine another rank of the same block of `count` has, too: they are on two machines."""
    known = [(rank, (rank // count, place)) for rank, place in enumerate(places) if 0 <= place < count]
    firsts: dict[tuple[int, int], int] = {}
    for rank, block in known:
        firsts.setdefault(block, rank)
    return [rank for rank, block in known if firsts[block] != rank]


def hosts_of_ranks() -> tuple[str, ...]:
    """Name of the machine of each rank; nothing if all are on one. Collective over the default group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return tuple(hosts) if len(set(hosts)) > 1 else ()


def compare_settings(settings: str, source: str) -> tuple[str, ...]:
    """Raise unless all ranks have read the same settings; return their machines' names, as `hosts_of_ranks`.

    Collective.

    Args:
        settings: Settings of this rank, as text.
        source: File that they are from; named where there are several machines, which may have different ones.

    Raises:
        RankMismatchError: Names the ranks that differ from rank 0, their machines and files.
    """
    hosts = hosts_of_ranks()
    # The layouts may differ, so no stages are named.
    compare_over_ranks(
        "config", settings, lambda rank: f"rank {rank}{f' on {hosts[rank]}' if hosts else ''}", source if hosts else ""
    )
    return hosts


def compare_over_ranks(what: str, value: str, describe: Callable[[int], str], source: str = "") -> None:
    """Raise on every rank unless all ranks have the same `value`; collective over the default group.

    Args:
        what: Thing that is compared, in words.
        value: This rank's.
        describe: Name of a rank.
        source: Origin of this rank's value.

    Raises:
        RankMismatchError: Names the ranks that differ from rank 0, and where they have it from.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    said = [("", "")] * dist.get_world_size()
    dist.all_gather_object(said, (value, source))
    values = [each for each, _ in said]
    names = [describe(rank) + (f" [{origin}]" if origin else "") for rank, (_, origin) in enumerate(said)]
    odd = [name for name, other in zip(names, values, strict=True) if other != values[0]]
    if odd:
        raise RankMismatchError(
            f"{', '.join(odd)} made another {what} than {names[0]}: {sorted(set(values))}. All ranks must read the "
            "same YAML file, load the same model and run the same versions of torch and transformers."
        )
