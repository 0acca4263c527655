"""Parameter groups of an optimizer, over the ranks that each have a part of its parameters.

An optimizer that was made of the whole model has the same groups everywhere, some of them without a parameter on this
rank. One that user code made of what a stage holds (a group a parameter, rates by name) has groups of its own there: in
another number, or in another order. A checkpoint has all of them, and a rank that resumes finds its own by their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from hf_parallel.checkpoints.agree import everyone
from hf_parallel.checkpoints.state.optimizer import OptimizerView, encode
from hf_parallel.errors import CheckpointError


OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")  # lists of a scheduler with one entry a parameter group
OWN = -1  # a group that no checkpoint can know: it has no parameters


@dataclass(frozen=True)
class Groups:
    """The groups of all ranks.

    Args:
        saved: Settings of each, and the names of its parameters under "params".
        sources: Rank and index of each where ranks have groups of their own; None where all have the same.
    """

    saved: list[dict[str, Any]]
    sources: list[tuple[int, int]] | None = None

    def whole(self, scheduler: Mapping[str, Any]) -> dict[str, Any]:
        """State of a learning-rate scheduler with one entry for each of these groups; all ranks call it."""
        found = dict(scheduler)
        if self.sources is None:
            return found
        lists = everyone({key: found[key] for key in OF_GROUPS if isinstance(found.get(key), list)})
        for key in lists[0]:
            if all(len(lists[rank].get(key, ())) > index for rank, index in self.sources):
                found[key] = [lists[rank][key][index] for rank, index in self.sources]
        return found


def together(optimizer: Optimizer, owned: Sequence[Sequence[str]], order: Sequence[str]) -> Groups:
    """Put the groups of all ranks together; all ranks call it.

    Args:
        optimizer: This rank's.
        owned: For each of its groups, the parameters that this rank answers for.
        order: All parameters of the model.
    """
    settings = [{key: encode(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
    of_ranks = everyone([{**each, "params": list(names)} for each, names in zip(settings, owned, strict=True)])
    return put_together(of_ranks, order)


def put_together(of_ranks: Sequence[Sequence[Mapping[str, Any]]], order: Sequence[str]) -> Groups:
    """The groups of a checkpoint from those of each rank.

    Groups with the same place and settings on every rank are one. If any differ, each rank's are groups by themselves, in
    the order of the model; ranks that hold the same (replicas, tensor-parallel ranks) say the same.
    """
    if all(_settings(groups) == _settings(of_ranks[0]) for groups in of_ranks):
        names: list[dict[str, None]] = [{} for _ in of_ranks[0]]
        for groups in of_ranks:
            for index, group in enumerate(groups):
                names[index].update(dict.fromkeys(group["params"]))
        return Groups([{**group, "params": list(names[index])} for index, group in enumerate(of_ranks[0])])
    place = {name: index for index, name in enumerate(order)}
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for rank, groups in enumerate(of_ranks):
        for index, group in enumerate(groups):
            if group["params"]:
                found.setdefault(tuple(group["params"]), (rank, index))
    sources = sorted(found.items(), key=lambda item: min(place.get(name, len(place)) for name in item[0]))
    return Groups([dict(of_ranks[rank][index]) for _, (rank, index) in sources], [source for _, source in sources])


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def match_groups(saved: Sequence[Mapping[str, Any]], view: OptimizerView) -> list[int]:
    """Find the saved group of each group of the optimizer, by the names of its parameters on this rank.

    A group may be several of the checkpoint with the same settings, and several with the same settings may be one of it:
    then stages had groups of their own, and other stages have others.

    Returns:
        An index for each group; `OWN` for one without parameters that has no counterpart.

    Raises:
        CheckpointError: Other parameters are trained, or they are grouped in another way.
    """
    current = view.group_names
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    _check_trained(view, group_of)
    then, now = _settings(saved), [_comparable(group) for group in view.optimizer.param_groups]
    found: list[int] = []
    taken: dict[int, int] = {}  # saved group -> the first group that it became
    for index, group in enumerate(current):
        sources = sorted({group_of[name] for name in group})
        if not sources:
            found.append(index if len(saved) == len(current) else OWN)
            continue
        alike = all(then[source] == then[sources[0]] for source in sources)
        firsts = [taken[source] for source in sources if source in taken]
        if not alike or any(now[first] != now[index] for first in firsts):
            raise CheckpointError(_why_not(view, len(saved), index))
        taken |= {source: index for source in sources if source not in taken}
        found.append(sources[0])
    return found


def _why_not(view: OptimizerView, num_saved: int, index: int) -> str:
    kind, current = type(view.optimizer).__name__, view.group_names
    if num_saved != len(current):
        return (
            f"the checkpoint has {num_saved} parameter groups, this run's {kind} has {len(current)}. Resume with the groups it "
            "was saved with."
        )
    return (
        f"group {index} of this run's {kind} (with {current[index][0]}) is not one of the checkpoint's, which has other "
        "parameter groups: the weight-decay rule or the learning rates changed. Resume with the settings it was saved with."
    )


def _comparable(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: encode(value) for key, value in group.items() if key != "params"}


def _check_trained(view: OptimizerView, group_of: Mapping[str, int]) -> None:
    trained = {name for group in view.group_names for name in group}
    changed = sorted(trained - group_of.keys()) or sorted((view.parameters.keys() & group_of.keys()) - trained)
    if changed:
        now, then = ("is trained now", "was not") if changed[0] in trained else ("is not trained now", "was")
        raise CheckpointError(
            f"{changed[0]} {now} and {then} when the checkpoint was saved: it has other parameter groups than this run's "
            f"{type(view.optimizer).__name__}. Resume with the frozen parameters it was saved with."
        )


def of_these_groups(scheduler: Mapping[str, Any], order: Sequence[int], own: Mapping[str, Any]) -> dict[str, Any]:
    """A saved scheduler's state with one entry for each group of this rank.

    Args:
        scheduler: State of a scheduler as it was saved.
        order: Result of `match_groups`.
        own: State of this rank's scheduler.
    """
    found = dict(scheduler)
    for key in OF_GROUPS:
        held, mine = found.get(key), own.get(key)
        if not isinstance(held, list) or max(order, default=OWN) >= len(held):
            continue
        default = mine if isinstance(mine, list) and len(mine) == len(order) else [None] * len(order)
        found[key] = [default[place] if index == OWN else held[index] for place, index in enumerate(order)]
    return found
