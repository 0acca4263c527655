"""Records and compares the settings of an optimizer for each parameter, step by step.

A weight decay or an epsilon that is off moves weights by less than rounding does in three steps of a small rate, so it is compared
itself; and where the ranks of a layout notice it, they stop before anything else differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias


ALIKE = 1e-6  # relative: the same formula gave both, in fp64
Settings: TypeAlias = dict[str, dict[str, list[float]]]  # name of a parameter -> setting -> its numbers


class Apart(NamedTuple):
    """A setting that differs: which, of which parameter, on which rank, and by how much of it."""

    key: str
    name: str
    rank: int
    relative: float


def settings_of(groups: Iterable[Mapping[str, Any]], names: Iterable[Iterable[str]]) -> Settings:
    """The numbers that each parameter is updated with.

    Args:
        groups: Groups of an optimizer.
        names: Names of the parameters in each group.
    """
    found: Settings = {}
    for group, inside in zip(groups, names, strict=True):
        numbers = {key: _numbers(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        numbers = {key: each for key, each in numbers.items() if each}
        found |= dict.fromkeys(inside, numbers)
    return found


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [float(each) for each in values if type(each) in (int, float)]


def file_of(step: int) -> str:
    """Name of the file with the settings of a step."""
    return f"optimizer-{step}.json"


def settings_apart(step: int, reference: Path, ranks: Sequence[Path]) -> list[Apart]:
    """Find settings of the ranks' optimizers that differ from those of one process at the beginning of a step, from 0.

    Empty if one of them never began it. Without names if all parameters of all ranks are meant.
    """
    if not all((place / file_of(step)).exists() for place in (reference, *ranks)):
        return []
    wanted, everyone = _read(reference, step), [_read(place, step) for place in ranks]
    found = [each for rank, got in enumerate(everyone) for each in _apart(wanted, got, rank)]
    every = {(rank, name) for rank, got in enumerate(everyone) for name in got}
    if {(each.rank, each.name) for each in found} == every:
        found = [each._replace(name="") for each in found]
    return list(dict.fromkeys(found))


def _apart(wanted: Settings, got: Settings, rank: int) -> Iterator[Apart]:
    for name, settings in got.items():
        for key, values in settings.items():
            right = wanted.get(name, {}).get(key, [])
            apart = max((abs(a - b) / (abs(b) or 1.0) for a, b in zip(values, right, strict=False)), default=0.0)
            if apart > ALIKE:
                yield Apart(key, name, rank, apart)


def _read(folder: Path, step: int) -> Settings:
    found: Settings = json.loads((folder / file_of(step)).read_text())
    return found
