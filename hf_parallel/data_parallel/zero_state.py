"""Partitioned optimizer state by parameter name, whole: what a checkpoint holds does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.data_parallel.flat import FlatShard, pack_state
from hf_parallel.data_parallel.zero import ZeroPartition


MASTER_WEIGHT = "master_weight"  # the fp32 copy of a parameter that is in half precision


@torch.no_grad()
def collect_state(zero: ZeroPartition) -> dict[str, dict[str, Any]]:
    """Parameter name -> its optimizer state, whole tensors on the CPU, on rank 0 of the shard group; {} elsewhere.

    Collective over the shard group. The fp32 copy of a half-precision parameter is part of its state.
    """
    found: dict[str, dict[str, Any]] = {}
    for shard in zero.shards:
        state = dict(zero.optimizer.state.get(shard.master, {}))
        if shard.is_finer:
            state[MASTER_WEIGHT] = shard.master.detach()
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != shard.master.shape:
                for name in shard.bucket.names if zero.shard_group.rank() == 0 else ():
                    found.setdefault(name, {})[key] = value
                continue
            whole = _gather(value.to(shard.flat.device), zero.shard_group)
            if whole is not None:
                for name, param, start in zip(
                    shard.bucket.names, shard.bucket.params, shard.bucket.offsets, strict=True
                ):
                    part = whole[start : start + param.numel()].view(param.shape).clone()
                    found.setdefault(name, {})[key] = part
    return found


def _gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """The concatenation of the ranks' f[n] on rank 0 of the group, on the CPU."""
    first = group.rank() == 0
    parts = [torch.empty_like(mine) for _ in range(group.size())] if first else None
    dist.gather(mine.contiguous(), parts, dst=dist.get_global_rank(group, 0), group=group)
    return torch.cat([part.cpu() for part in parts]) if parts is not None else None


@torch.no_grad()
def restore_state(
    zero: ZeroPartition, states: Mapping[str, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Put back what `collect_state` gave, or the state of an optimizer that was not partitioned.

    Args:
        zero: A partition of the same parameters, over any number of ranks.
        states: Parameter name -> state.
        settings: Of each parameter group, without its parameters.
    """
    zero.refresh()
    order = [shard for index in range(len(settings)) for shard in zero.shards if shard.group == index]
    packed: dict[int, dict[str, object]] = {}
    for position, shard in enumerate(order):
        mine = {at: states[name] for at, name in enumerate(shard.bucket.names) if name in states}
        state = pack_state(shard, mine)
        master = state.pop(MASTER_WEIGHT, None)
        if shard.is_finer and isinstance(master, Tensor):
            _keep_master(shard, master, mine)
        if state:
            packed[position] = state
    positions = {id(shard.master): position for position, shard in enumerate(order)}
    groups = [
        {**saved, "params": [positions[id(param)] for param in group["params"]]}
        for saved, group in zip(settings, zero.optimizer.param_groups, strict=True)
    ]
    zero.optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _keep_master(shard: FlatShard, master: Tensor, states: Mapping[int, Mapping[str, Any]]) -> None:
    """The saved fp32 copies, of the parameters that have one."""
    for position in states:
        piece = shard.inside(position)
        if piece is not None and MASTER_WEIGHT in states[position]:
            shard.master[piece] = master[piece]
