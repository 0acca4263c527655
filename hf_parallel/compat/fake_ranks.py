"""One process as a rank among others that do not exist: collectives return at once and send nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from hf_parallel.compat.fake_cuda import replaced
from hf_parallel.errors import UnsupportedError


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int, ranks_per_node: int, backend: str) -> Iterator[None]:
    """Inside, this process is one rank of a world; what arrives from others is what was there before.

    Args:
        rank: Rank of this process.
        world_size: Ranks of the world.
        ranks_per_node: Ranks of the world on each machine.
        backend: Backend that groups say they have: "nccl" or "gloo".

    Raises:
        UnsupportedError: There is a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UnsupportedError(
            "a dry run makes a process group of its own, and this process has one. Run it in a process without."
        )
    from torch.distributed._tools import fake_collectives  # noqa: F401 - registers what collectives do to fake tensors

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    try:
        with replaced(dist, **_answers(backend)):
            yield
    finally:
        dist.destroy_process_group()
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def _answers(backend: str) -> dict[str, Any]:
    stock_group = dist.new_group
    asked: dict[str, str] = {}

    def new_group(*args: Any, **kwargs: Any) -> Any:
        kind = kwargs.pop("backend", None)
        group = stock_group(*args, **kwargs)
        if kind is not None and isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            asked[group.group_name] = kind
        return group

    def get_backend(group: Any = None) -> str:
        return asked.get(getattr(group, "group_name", ""), backend)

    def get_backend_config(group: Any = None) -> str:
        kind = get_backend(group)
        return f"{'cuda' if kind == 'nccl' else 'cpu'}:{kind}"

    def all_gather_object(objects: list[Any], obj: Any, group: Any = None) -> None:
        objects[:] = [obj] * len(objects)

    return {
        "new_group": new_group,
        "get_backend": get_backend,
        "get_backend_config": get_backend_config,
        "all_gather_object": all_gather_object,
        "broadcast_object_list": lambda *args, **kwargs: None,
    }


def ranks_of_group(group: Any) -> tuple[str, list[int]]:
    """Name and world ranks of what an op of `torch.ops.c10d` was given as its group."""
    found = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    return found.group_name, dist.get_process_group_ranks(found)


def group_named(name: str) -> Any:
    """The group that an op of functional collectives was given by name."""
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)
