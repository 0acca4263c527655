"""Replicas whose weights are no longer the same: they train several models, and rank 0's is the one that is saved.

Code that changes weights, gradients or an optimizer on some ranks only does this, and DDP would not say so. The weights are
compared whenever a checkpoint is written and when training ends, by a number each. Kernels of unlike GPUs may round
differently, so what differs is also measured: a little is said, much is refused. With ZeRO 1 and 2 each rank's update
overwrites what the others have of its part, so that nothing is left to compare later: there a few elements are looked at in
every norm and before every update, and compared in the message that adds up the norm, and before a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.data_parallel.fsdp_parts import local_of
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.weights.alike import digest_of, factors
from hf_parallel.guards.weights.start import WRAPS, differing, fingerprints, wire_device
from hf_parallel.guards.weights.trained import BITS


MEASURED = 8  # of the tensors that differ
ROUNDING = 1e-3  # of a tensor's norm
BUFFERS, ELEMENTS = 16, 1024  # that are looked at in every step, and of each
_FACTORS: dict[torch.device, Tensor] = {}


class WeightsOfSteps:
    """Numbers for some elements of what all replicas hold, and of experts that some of them hold.

    A number has those of earlier updates in it: what was changed after the norm and overwritten by the update still tells.

    Args:
        zero: The partition.
    """

    def __init__(self, zero: ZeroPartition) -> None:
        self._zero = zero
        self._before: list[Tensor | int] = [1, 1]

    def update(self) -> None:
        """Remember digests of the weights before an optimizer overwrites what other ranks have of its part."""
        for shard in self._zero.shards:
            shard.return_to_buffer()  # where `p.data = ...` has put a parameter elsewhere
        self._before = self.digests()

    @torch.no_grad()
    def digests(self) -> list[Tensor | int]:
        """Zero where nothing is held alike. A GPU is not waited for."""
        zero = self._zero
        if zero.late is not None:
            zero.late.wait_for_all()
        shared = [shard for shard in zero.shards if shard.sharers is not None]
        common = [shard.flat for shard in shared if shard.sharers is zero.shard_group]
        experts = [shard.flat for shard in shared if shard.sharers is not zero.shard_group]
        now = _digest(common), _digest(experts)
        return [_joined(before, one) for before, one in zip(self._before, now, strict=True)]


def _joined(before: Tensor | int, now: Tensor | int) -> Tensor | int:
    """A number for two, never zero: products of 48 bits and 15 bits are the same in Python and in i64."""
    if isinstance(now, int) and not now:
        return 0
    return ((before * 0x6C8F ^ now) & ((1 << BITS) - 1)) | 1


def _digest(flats: Sequence[Tensor]) -> Tensor | int:
    if not flats:
        return 0
    device, dtype = flats[0].device, flats[0].dtype
    alike = [flat for flat in flats[:: -(-len(flats) // BUFFERS)] if flat.dtype == dtype and flat.device == device]
    some = torch.cat([flat[:: -(-len(flat) // ELEMENTS)] for flat in alike])
    if type(some) is not Tensor:  # of a dry run, without values
        return 0
    if device not in _FACTORS:
        _FACTORS[device] = factors(BUFFERS * ELEMENTS, device)
    return digest_of(some, _FACTORS[device][: len(some)])


def refuse_unlike_drops(rank: int) -> None:
    """Refuse gradients that a message has shown to be dropped on some ranks only.

    Args:
        rank: Rank that dropped others than the first rank that should have dropped the same; 0 if there is none.

    Raises:
        RankMismatchError: Such a rank exists.
    """
    if rank:
        raise RankMismatchError(
            f"rank {rank} dropped other gradients before an optimizer step than the other replicas (optimizer.zero_grad(), p.grad = "
            "None), and with ZeRO each rank updates a part of the weights: some parts were updated and others not. Code decides by a "
            "number of its own rank (`if loss > limit:`). Decide by one that is reduced over the ranks (accelerator.reduce), so "
            "that all do the same."
        )


def refuse_unlike_weights(rank: int) -> None:
    """Refuse weights that a message with digests has shown to differ.

    Args:
        rank: Rank whose weights are not those of the first rank that should have the same; 0 if there is none.

    Raises:
        RankMismatchError: There is one.
    """
    if rank:
        raise RankMismatchError(
            f"the weights of rank {rank} are not those of the other replicas, and with ZeRO each rank updates a part of them for "
            "all: what others changed of it would be lost. Code changed weights on some ranks only (`if "
            "state.is_world_process_zero`?), or with random numbers of each rank's own. Do it on every rank, with the same numbers."
        )


@torch.no_grad()
def refuse_drift(held: Iterable[tuple[Mapping[str, Tensor], dist.ProcessGroup | None]]) -> str:
    """Compare the trained parameters of replicas; collective over the world, which hears of what any of its ranks finds.

    Args:
        held: Name -> this rank's parameter, the same names on all ranks of a group, and the group of those that hold the same
            parameters; None if nobody else does.

    Returns:
        What to say of small differences, "" if there are none.

    Raises:
        RankMismatchError: Names the tensor that differs most; on every rank of the world.
    """
    mine = max((drift_of(parameters, group) for parameters, group in held), key=itemgetter(0))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    share, found = max(everyone, key=itemgetter(0))
    refuse_apart(share, found)
    if not found:
        return ""
    return f"{found}: GPUs of unlike kinds, or noise that each rank draws for itself. Rank 0's weights are saved."


def refuse_apart(share: float, found: str) -> None:
    """Refuse what `drift_of` has found to be more than rounding.

    Raises:
        RankMismatchError: It is.
    """
    if share > ROUNDING:
        raise RankMismatchError(
            f"{found}: each replica trains another model, and that of rank 0 would be saved. Code changed weights, gradients or "
            "the optimizer on some ranks only (`if state.is_world_process_zero`?). Do it on every rank."
        )


@torch.no_grad()
def drift_of(parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> tuple[float, str]:
    """Find the parameter that differs most over the group: how far, and its name in words; collective over the group."""
    if group is None:
        return -1.0, ""
    trained = [
        name
        for name, p in parameters.items()
        if p.requires_grad and p.is_floating_point() and not (p.is_meta or WRAPS(local_of(p)))
    ]
    numbers = dict(zip(trained, fingerprints(local_of(parameters[name]) for name in trained), strict=True))
    names = list(parameters)
    odd = [names[index] for index in differing([numbers.get(name) for name in names], group)]
    if not odd:
        return -1.0, ""
    apart = {name: _apart(local_of(parameters[name]), group) for name in odd[:MEASURED]}
    worst = max(apart, key=lambda name: apart[name])
    return apart[worst], (
        f"parameter {worst} differs between the replicas by {apart[worst]:.1e} of its norm "
        f"({len(odd)} of {len(names)} parameters differ)"
    )


def _apart(tensor: Tensor, group: dist.ProcessGroup) -> float:
    """The largest distance of a rank's tensor from that of the group's first, as a share of that one's norm; collective."""
    device, ranks = wire_device(group), dist.get_process_group_ranks(group)
    mine = tensor.detach().to(device, torch.float32, copy=True).contiguous()
    first = mine.clone()
    dist.broadcast(first, src=ranks[0], group=group)
    distance = (mine - first).norm() / first.norm().clamp(min=torch.finfo(torch.float32).tiny)
    distance.nan_to_num_(nan=float("inf"))
    dist.all_reduce(distance, op=dist.ReduceOp.MAX, group=group)
    return float(distance)
