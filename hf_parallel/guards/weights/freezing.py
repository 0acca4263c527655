"""Parameters that user code freezes or unfreezes between steps, made known to all stages of a pipeline.

What a stage sends says whether it wants gradients back, and the next stage learns it once. User code on a rank sees the
parameters of that rank only, so the others cannot notice by themselves.

While everything is trained, nothing can be unfrozen, and what is frozen needs no message before a schedule: the schedule
runs as before, a flag is part of the message with its loss, and what it computed for frozen parameters is dropped
before the update. While something is frozen, the stages ask each other before each schedule (one small message over host
memory, no device waits for it), because the gradients of what is unfrozen could not be made up for. With ZeRO they always
do: its gradients are in parts by the time that the others know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.weights.trained import RULE
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh, new_group_of


SAME, FROZEN, UNFROZEN = 0, 1, 2


class Freezing:
    """Notices what was frozen or unfrozen since it last looked; building it is collective.

    Args:
        model: The cut model.
        ledger: Ledger of the whole model.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        replicas: Their buffers may be laid out for what was trained at the start. With ZeRO stages ask each other before each
            schedule even if everything is trained, because gradients that are made cannot be dropped.
        asked: Name of a parameter of another stage -> whether user code on this rank wants it trained; emptied when it is compared.

    Attributes:
        group: The stages, for messages over host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        replicas: Replicas,
        asked: dict[str, bool],
    ) -> None:
        self._model, self._parameters, self._replicas = model, dict(parameters), replicas
        self._ledger, self._mesh, self._asked = ledger, mesh, asked
        # A tied parameter may have been changed under a name that only one of its stages has.
        self._shared = [entry.name for entry in ledger if entry.kind == "param" and len(entry.holders) > 1]
        self.group = mesh.pp_group
        if mesh.pp_group is not None and "gloo" not in dist.get_backend(mesh.pp_group):
            lists = mesh.shape.groups(lambda d, p, t, s: (d, t, s))
            self.group = new_group_of(lists, timeout=mesh.timeout, backend="gloo")
        self._trained = self._now()
        self._to_freeze: list[nn.Parameter] = []  # trained until the other stages know
        self._late: list[nn.Parameter] = []  # frozen by now, of which a schedule under way has made gradients
        self._unread: list[Tensor] = []
        self._forget = False
        self._asks = False
        self._ask()

    def _now(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._parameters.items()}

    def begin(self) -> bool:
        """A schedule begins: whether stages tell each other anew what they send; collective if something is frozen.

        Every holder of a shared parameter then has it in the new state.
        """
        if self.group is None:
            return False
        if self._has_changed():
            self._late += self._settle()
        elif self._asks:
            self._settle()
        else:
            for name, trained in self._trained.items():
                parameter = self._parameters[name]
                if trained and not parameter.requires_grad:
                    parameter.requires_grad_(True)
                    self._to_freeze.append(parameter)
        forget, self._forget = self._forget, False
        return forget

    @property
    def doubtful(self) -> list[nn.Parameter]:
        """This rank's parameters of which it is not certain that the gradients of a schedule under way will count."""
        if self.group is None:
            return []
        shared = [self._parameters[name] for name in self._shared if name in self._parameters]
        found = {id(parameter): parameter for parameter in (*self._to_freeze, *self._late, *shared)}
        return list(found.values())

    def put(self, slot: Tensor) -> None:
        """Write whether this rank has something to freeze into what will be summed over the ranks (one element)."""
        slot.fill_(float(bool(self._to_freeze or self._asked)))

    def arrived(self, slot: Tensor) -> None:
        """Keep the sum over the ranks, which is read when the schedule's gradients are finished."""
        if torch.is_grad_enabled():  # not an evaluation
            self._unread.append(slot)

    def finish(self) -> list[nn.Parameter]:
        """The backward pass of a schedule ends; collective if a rank has frozen something.

        Returns:
            This rank's parameters that are frozen from now on, whose gradients of the schedule do not count.
        """
        if self.group is None:
            return []
        late, self._late = self._late, []
        return late + (self._settle() if self._has_changed() else [])

    def _settle(self) -> list[nn.Parameter]:
        """Ask, and freeze what was to be frozen; the parameters that were trained until now."""
        before = self._now()
        for parameter in self._to_freeze:
            parameter.requires_grad_(False)
        self._to_freeze = []
        self._ask()
        return [p for name, p in self._parameters.items() if before[name] and not p.requires_grad]

    def _has_changed(self) -> bool:
        """Whether a rank has frozen something, the same on all."""
        unread, self._unread = self._unread, []
        return any(float(slot) > 0 for slot in unread)

    def _ask(self) -> None:
        """Compare with the other stages; collective over the pipeline."""
        if self.group is None:
            return
        now = self._now()
        changed = {name: value for name, value in now.items() if value != self._trained[name]}
        words = [2 if self._asked else int(bool(changed)), int(self._replicas.partitions or not all(now.values()))]
        words += [UNFROZEN if changed.get(name) else FROZEN if name in changed else SAME for name in self._shared]
        said = torch.tensor(words, dtype=torch.int32)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        anywhere, self._asks, *states = said.tolist()
        if anywhere == 2:
            self._refuse_unlike(now)
        if not anywhere:
            return
        for name, state in zip(self._shared, states, strict=True):
            if name in self._parameters and state != SAME:
                self._parameters[name].requires_grad_(state == UNFROZEN)
        self._freeze_spare()
        self._refuse_fixed()
        self._trained = self._now()
        self._forget = True

    def _refuse_unlike(self, now: Mapping[str, bool]) -> None:
        """Refuse what user code set of a parameter of another stage, and not on that one; collective over the pipeline.

        Raises:
            RankMismatchError: On every stage.
        """
        group = self.group
        everyone: list[Any] = [None] * dist.get_world_size(group)
        asked = {self._ledger.find(name).name: value for name, value in self._asked.items()}
        self._asked.clear()
        dist.all_gather_object(everyone, (asked, dict(now)), group=group)
        stages = [self._mesh.shape.describe(rank) for rank in dist.get_process_group_ranks(self._mesh.pp_group)]
        for stage, (wanted, _) in zip(stages, everyone, strict=True):
            for other, (_, held) in zip(stages, everyone, strict=True):
                name = next((name for name, value in wanted.items() if held.get(name, value) != value), None)
                if name is not None:
                    raise RankMismatchError(
                        f"requires_grad of {name} was set to {wanted[name]} on {stage} and is {held[name]} on {other}, whose stage has it: "
                        f"{RULE}"
                    )

    def _refuse_fixed(self) -> None:
        """Refuse changes that come too late, on every stage alike; collective over the pipeline."""
        now = self._now()
        frozen = [name for name, was_trained in self._trained.items() if was_trained and not now[name]]
        unfrozen = [name for name, was_trained in self._trained.items() if not was_trained and now[name]]
        found: list[list[str]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(found, self._replicas.fixed(frozen, unfrozen), group=self.group)
        self._replicas.refuse(list(dict.fromkeys(name for names in found for name in names)))

    def _freeze_spare(self) -> None:
        """Freeze parameters that this stage could not take out of the model: another stage trains them."""
        held = {id(parameter) for parameter in self._parameters.values()}
        for parameter in self._model.parameters():
            if id(parameter) not in held:
                parameter.requires_grad_(False)
