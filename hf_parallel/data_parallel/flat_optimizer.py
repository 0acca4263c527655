"""An optimizer that has flat parts of parameters, with the state that it had of these."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from hf_parallel.data_parallel.flat import FlatShard, is_per_element, pack_state
from hf_parallel.errors import UnsupportedError


def group_of_parameters(optimizer: Optimizer) -> dict[int, int]:
    """Id of a parameter -> index of its group.

    Raises:
        UnsupportedError: If a parameter is in two groups.
    """
    found: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if found.setdefault(id(param), index) != index:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(param.shape)} is in the optimizer's groups {found[id(param)]} and "
                    f"{index}: with ZeRO each is updated by one rule. Put it into one group."
                )
    return found


def take_over(optimizer: Optimizer, shards: Sequence[FlatShard]) -> list[tuple[FlatShard, list[str]]]:
    """Give the optimizer the flat parts in place of the parameters, with the state it has of these.

    Returns:
        Parts of which it has state, and the names of their parameters of which it has none.
    """
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [shard.master for shard in shards if shard.group == index]
    old = dict(optimizer.state)
    optimizer.state.clear()
    unstepped: list[tuple[FlatShard, list[str]]] = []
    for shard in shards:
        named = list(zip(shard.bucket.names, shard.bucket.params, strict=True))
        found = [(position, old[param]) for position, (_, param) in enumerate(named) if old.get(param)]
        if found:
            optimizer.state[shard.master] = pack_state(shard, dict(found))
            unstepped.append((shard, [name for name, param in named if not old.get(param)]))
    return unstepped


def per_element(optimizer: Optimizer, shard: FlatShard) -> list[Tensor]:
    """State tensors with one entry an element of the part."""
    state = optimizer.state.get(shard.master, {})
    return [value for key, value in state.items() if is_per_element(value, key, shard.master)]
