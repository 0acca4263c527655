"""A `state_dict` that somebody made by himself, of tensors of one rank, is not saved as if it were the whole model's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Entry, Ledger


FIX = (
    "Call model.save_pretrained(folder), or trainer.save_model(folder) with a Trainer, on every rank and without a state_dict; or "
    "give it accelerator.get_state_dict(model), called on every rank."
)


def refuse_part(state: Mapping[str, Any], ledger: Ledger, pp_rank: int) -> None:
    """Refuse what has parts of tensors, or tensors of this rank's stages only where others have more of their kind.

    A choice of tensors is saved as it is: one that knows of other stages, or whose kinds of tensors are all here.

    Args:
        state: Name in the model -> tensor; other names count for nothing.
        ledger: Ledger of the whole model.
        pp_rank: Pipeline rank of this process.

    Raises:
        UnsupportedError: Names a tensor that is missing or cut.
    """
    names = ledger.names
    given = [(ledger.find(name), tensor) for name, tensor in state.items() if name in names]
    for entry, tensor in given:
        if isinstance(tensor, DTensor) or (isinstance(tensor, torch.Tensor) and tuple(tensor.shape) != entry.shape):
            here = "a part of it" if isinstance(tensor, DTensor) else f"the shape {tuple(tensor.shape)}"
            raise UnsupportedError(
                f"save_pretrained(state_dict=...): {entry.name} of the model has the shape {entry.shape}, and the state_dict "
                f"has {here}: this rank holds a shard. {FIX}"
            )
    if any(pp_rank not in entry.holders for entry, _ in given):
        return
    kinds = {_kind(entry) for entry, _ in given}
    missing = [entry.name for entry in ledger if pp_rank not in entry.holders and _kind(entry) in kinds]
    if missing:
        raise UnsupportedError(
            f"save_pretrained(state_dict=...): all {len(given)} tensors of the state_dict are of this rank's stages, and "
            f"{len(missing)} more of their kinds are on other stages ({missing[0]} is the first): the folder would hold a part of "
            f"the model. {FIX}"
        )


def _kind(entry: Entry) -> str:
    """The name without numbers: the same of every block."""
    return re.sub(r"\d+", "", entry.name)
