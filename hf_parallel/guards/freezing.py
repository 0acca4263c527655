"""Parameters that user code freezes or unfreezes between steps, made known to all stages of a pipeline.

What a stage sends says whether it wants gradients back, and the next stage learns it once. User code on a rank sees the
parameters of that rank only, so the others cannot notice by themselves. One small message a schedule, over host memory:
no device waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ledger import Ledger
from hf_parallel.mesh import Mesh, new_group_of


SAME, FROZEN, UNFROZEN = 0, 1, 2


class Freezing:
    """Notices what was frozen or unfrozen since it last looked; building it is collective.

    Args:
        model: The cut model.
        ledger: Of the whole model.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
    """

    def __init__(self, model: nn.Module, ledger: Ledger, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        self._model, self._parameters = model, dict(parameters)
        # A tied parameter may have been changed under a name that only one of its stages has.
        self._shared = [entry.name for entry in ledger if entry.kind == "param" and len(entry.holders) > 1]
        self._group = mesh.pp_group
        if mesh.pp_group is not None and "gloo" not in dist.get_backend(mesh.pp_group):
            lists = mesh.shape.groups(lambda d, p, t: (d, t))
            self._group = new_group_of(lists, timeout=mesh.timeout, backend="gloo")
        self._trained = self._now()

    def _now(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._parameters.items()}

    def noticed(self) -> bool:
        """Whether any stage has frozen or unfrozen something since the last call; collective over the pipeline.

        Every holder of a shared parameter then has it in the new state.
        """
        if self._group is None:
            return False
        now = self._now()
        changed = {name: value for name, value in now.items() if value != self._trained[name]}
        words = [int(bool(changed))]
        words += [UNFROZEN if changed.get(name) else FROZEN if name in changed else SAME for name in self._shared]
        said = torch.tensor(words, dtype=torch.int32)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        anywhere, *states = said.tolist()
        if not anywhere:
            return False
        for name, state in zip(self._shared, states, strict=True):
            if name in self._parameters and state != SAME:
                self._parameters[name].requires_grad_(state == UNFROZEN)
        self._freeze_spare()
        self._trained = self._now()
        return True

    def _freeze_spare(self) -> None:
        """What is here only because it could not be taken out is trained elsewhere."""
        held = {id(parameter) for parameter in self._parameters.values()}
        for parameter in self._model.parameters():
            if id(parameter) not in held:
                parameter.requires_grad_(False)
