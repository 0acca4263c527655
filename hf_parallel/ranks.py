"""What ranks tell each other before a mesh exists: their machines, the links between them, the settings they have read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch.distributed as dist

from hf_parallel.errors import RankMismatchError
from hf_parallel.links import Links


def ranks_per_node() -> int:
    """Ranks that the launcher started on each node; all of them if it does not say."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def links_here(links_of: Callable[[int, int], Links]) -> Links:
    """The links of this run; collective over the default group.

    Args:
        links_of: Makes them of the number of ranks and that of each machine: of all where machines have different ones.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    counts = [ranks_per_node()] * world_size
    if world_size > 1:
        dist.all_gather_object(counts, ranks_per_node())
    even = len(set(counts)) == 1 and world_size % counts[0] == 0
    return links_of(world_size, counts[0] if even else world_size)


def hosts_of_ranks() -> tuple[str, ...]:
    """Name of the machine of each rank; nothing if all are on one. Collective over the default group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return tuple(hosts) if len(set(hosts)) > 1 else ()


def compare_settings(settings: str, source: str) -> tuple[str, ...]:
    """Raise unless all ranks have read the same settings; the names of their machines, as `hosts_of_ranks`. Collective.

    Args:
        settings: This rank's.
        source: Which file they are from; said where there are several machines, which may have different ones.

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
        what: What is compared, in words.
        value: This rank's.
        describe: Name of a rank.
        source: Where this rank has it from.

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
