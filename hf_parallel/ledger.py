"""The parameter ledger: one entry a tensor, identical on every rank, made before anything is cut or sharded.

It is the single answer to who holds a parameter, who owns it, how its gradient is reduced, who counts it in the
gradient norm, and who saves it. Tied parameters are one entry with several names; a parameter that several stages read
(a tied embedding and head) is one entry with several holders. The owner is the first holder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.tensor_parallel.layout import ShardSpec


@dataclass(frozen=True)
class Entry:
    """One parameter or persistent buffer of the full model.

    Args:
        name: First name in module order; the name used everywhere.
        aliases: All names in module order, the first included.
        state_names: Names in a state dict, one for each alias: torch's checkpoint wrapper leaves its own name out.
        shape: Full shape, before sharding.
        dtype: Such as `torch.float32`.
        kind: A trained tensor or a persistent buffer.
        holders: Pipeline ranks that need it, ascending; never empty.
        spec: Sharding over tp, None when every tp rank has all of it.
        used: False when no rank reads it in a forward pass: it is kept for the checkpoint only.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["param", "buffer"]
    holders: tuple[int, ...]
    spec: ShardSpec | None
    used: bool
    state_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.state_names:
            object.__setattr__(self, "state_names", self.aliases)

    @property
    def owner(self) -> int:
        """The pipeline rank that counts and saves it."""
        return self.holders[0]


class Ledger:
    """All entries by name, in module order.

    Args:
        entries: Name -> entry.
        names: All names of tensors, in the order of the model's state dict; those of the entries by default.
    """

    def __init__(self, entries: Mapping[str, Entry], names: Sequence[str] | None = None) -> None:
        self.entries = dict(entries)
        state_names = [name for entry in self.entries.values() for name in entry.state_names]
        self.names = tuple(state_names if names is None else names)
        self._by_alias = {
            alias: entry for entry in self.entries.values() for alias in (*entry.state_names, *entry.aliases)
        }

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def find(self, name: str) -> Entry:
        """The entry with `name` among its aliases.

        Raises:
            PlanError: No parameter has that name.
        """
        if name not in self._by_alias:
            raise PlanError(
                f"{name} was added to the model after the model was prepared for its ranks, so no rank knows it. Add it before "
                "trainer.train() or accelerator.prepare(model)."
            )
        return self._by_alias[name]

    def holds(self, pp_rank: int, name: str) -> bool:
        """Whether `pp_rank` keeps the parameter `name` (any alias)."""
        entry = self._by_alias.get(name)
        return entry is not None and pp_rank in entry.holders

    def held_by(self, pp_rank: int) -> list[Entry]:
        """Entries that `pp_rank` keeps, in module order."""
        return [entry for entry in self if pp_rank in entry.holders]

    def on_all(self, pp_size: int) -> frozenset[str]:
        """Names of the entries that all pipeline ranks keep."""
        return frozenset(entry.name for entry in self if len(entry.holders) == pp_size)

    def shared_holders(self) -> list[tuple[int, ...]]:
        """Distinct sets of pipeline ranks that hold a parameter together, sorted: each needs a gradient sum."""
        return sorted({entry.holders for entry in self if entry.kind == "param" and len(entry.holders) > 1})

    def fingerprint(self) -> str:
        """Hash to compare across ranks: equal ledgers make equal collectives."""
        rows = [
            [e.name, e.aliases, e.shape, str(e.dtype), e.holders, e.spec.to_json() if e.spec else None] for e in self
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def build_ledger(
    model: nn.Module,
    *,
    pp_size: int,
    holds: Callable[[int, str], bool],
    specs: Mapping[str, ShardSpec],
    home: int = 0,
) -> Ledger:
    """Make the ledger of a whole, unsharded model; changes nothing.

    Args:
        model: The model before any cut or shard.
        pp_size: Ranks of the pipeline.
        holds: `holds(pp_rank, name)`: does a stage of that rank need this parameter?
        specs: Parameter name -> shard layout; absent means replicated.
        home: Pipeline rank that keeps what no stage needs: that of the first stage.

    Raises:
        PlanError: Two names of one tied parameter are sharded differently.
        UnsupportedError: The model's state dict has another tensor in the place of a parameter, or one beside them.
    """
    entries: dict[str, Entry] = {}
    state = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, one in state.items():
        names_of.setdefault(id(one), []).append(name)
    for aliases, tensor, kind in _tensors(model, names_of):
        holders = tuple(rank for rank in range(pp_size) if any(holds(rank, alias) for alias in aliases))
        layouts = {alias: specs.get(alias) for alias in aliases}
        if len(set(layouts.values())) > 1:
            raise PlanError(
                f"the names {', '.join(aliases)} are one tied parameter but have different shard layouts: {layouts}. "
                "Shard all of them alike or none."
            )
        entries[aliases[0]] = Entry(
            name=aliases[0],
            aliases=aliases,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            kind=kind,
            holders=holders or (home,),
            spec=layouts[aliases[0]],
            used=bool(holders),
            state_names=_state_names(aliases, names_of.get(id(tensor), []), state),
        )
    known = {name for entry in entries.values() for name in entry.state_names}
    if not getattr(model, "is_quantized", False):  # whose scales are saved with adapters alone
        _refuse_others([name for name, one in state.items() if isinstance(one, torch.Tensor) and name not in known])
    return Ledger(entries, [name for name in state if name in known])


def _refuse_others(names: Sequence[str]) -> None:
    """Refuse tensors of a state dict that are no parameters or buffers; states of kernels (`_extra_state`) can be made anew."""
    others = [name for name in names if not name.endswith("_extra_state")]
    if others:
        raise UnsupportedError(
            f"model.state_dict() has {others[0]}, which is no parameter or buffer of the model: each rank saves its own part of those, "
            "and a saved model would lack it. Register it as a buffer (register_buffer)."
        )


def _state_names(aliases: Sequence[str], found: Sequence[str], state: Collection[str]) -> tuple[str, ...]:
    """Names of a tensor in a state dict, one for each of its aliases, given those that were found."""
    other = next((alias for alias in aliases if alias in state and alias not in found), None)
    if other is not None:
        raise UnsupportedError(
            f"model.state_dict() has another tensor than the parameter or buffer {other}: a hook puts it there "
            "(register_state_dict_post_hook?). Each rank saves its own part of the parameters, without it. Remove the hook, and "
            "change what accelerator.get_state_dict(model) returns, or a saved model."
        )
    renamed = iter([name for name in found if name not in aliases])
    return tuple(alias if alias in found else next(renamed, alias) for alias in aliases)


def _tensors(
    model: nn.Module, saved: Collection[int]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor, Literal["param", "buffer"]]]:
    """(all names, tensor, kind) of every distinct parameter and buffer in the state dict, in module order."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    for key, parameter in parameters.items():
        yield tuple(names[key]), parameter, "param"
    seen: dict[int, list[str]] = {}
    buffers: dict[int, torch.Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) in saved:
            seen.setdefault(id(buffer), []).append(name)
            buffers[id(buffer)] = buffer
    for key, buffer in buffers.items():
        yield tuple(seen[key]), buffer, "buffer"
