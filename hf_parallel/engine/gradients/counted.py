"""Choose the elements that a rank counts in a norm of the whole model, so that each is counted exactly once."""

from __future__ import annotations

import torch
from torch import nn

from hf_parallel.data_parallel.fsdp_parts import is_part, local_of, rows_of
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh.groups import Mesh


class Counted:
    """Selects what this rank counts of each parameter, so that over all ranks each element of the full model counts once.

    Args:
        ledger: The model's ledger.
        mesh: This rank's mesh.
        replicas_add_up: Whether what is counted is summed over all replicas, each of which has other parts of it (ZeRO).
    """

    def __init__(self, ledger: Ledger, mesh: Mesh, *, replicas_add_up: bool = False) -> None:
        self._ledger, self._mesh = ledger, mesh
        # Of the replicas that share experts one counts the rest.
        self._counts_whole = mesh.tp_rank == 0 and (replicas_add_up or mesh.ep_rank == 0)

    def _ranges(self, name: str, parameter: nn.Parameter, *, own: bool = False) -> list[tuple[int, int]] | None:
        """Pieces (start, length) along the sharded dim that this rank counts in the norm; None for all of a parameter."""
        entry: Entry = self._ledger.entries[name]
        if entry.owner != self._mesh.pp_rank and not own:
            return []
        if entry.spec is None:
            return None if self._counts_whole else []
        pieces = entry.spec.counted(self._mesh.parts.size, self._mesh.parts.rank)
        return None if sum(length for _, length in pieces) == parameter.shape[entry.spec.dim] else pieces

    def of_model(self, name: str, parameter: nn.Parameter) -> bool | torch.Tensor:
        """The elements of a parameter that this rank counts in the norm: all, none, or a mask of its shape."""
        return self._mask(name, parameter, self._ranges(name, parameter))

    def of_stage(self, name: str, parameter: nn.Parameter) -> bool | torch.Tensor:
        """Like `of_model`, but also where another stage counts the parameter in the norm of the model."""
        return self._mask(name, parameter, self._ranges(name, parameter, own=True))

    def _mask(self, name: str, parameter: nn.Parameter, ranges: list[tuple[int, int]] | None) -> bool | torch.Tensor:
        spec = self._ledger.entries[name].spec
        if not ranges or spec is None:
            return ranges is None
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        for start, length in ranges:
            mask.narrow(spec.dim, start, length).fill_(True)
        return mask

    def gradients(self, name: str, parameter: nn.Parameter) -> list[torch.Tensor]:
        """The parts of this rank's gradient of `name` that this rank counts in the norm."""
        gradient = parameter.grad
        if gradient is None:
            return []
        if is_part(gradient):
            wanted, part = self.of_model(name, parameter), local_of(gradient)
            if isinstance(wanted, torch.Tensor):
                return [part * rows_of(gradient, wanted).to(part.device)]
            return [part] if wanted else []
        ranges, spec = self._ranges(name, parameter), self._ledger.entries[name].spec
        if not ranges or spec is None:
            return [gradient] if ranges is None else []
        return [gradient.narrow(spec.dim, start, length) for start, length in ranges]
