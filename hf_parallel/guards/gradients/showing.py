"""Shows the reduced gradients to user code as `parameter.grad`, and takes back what user code made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_clipping import answer_norms_of_nothing
from hf_parallel.compat.private_collectives import all_gather_new
from hf_parallel.compat.private_torch import version_of
from hf_parallel.data_parallel.flat import FlatShard
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.norms import NormsOfShown
from hf_parallel.guards.gradients.parts import CountRule, FlatGradient, LocalGradient
from hf_parallel.guards.gradients.scaled import StageFactors
from hf_parallel.guards.gradients.shards import Shards
from hf_parallel.guards.gradients.shown import SharedGradient, plain_of
from hf_parallel.guards.gradients.stand_ins import StandIns
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


NEVER_REDUCED = (
    "optimizer.step() was called on a gradient of {name} that was never reduced: user code assigned it (torch.autograd.grad gives "
    "such), and no backward pass of this step has given one, so that each replica may have its own. Call "
    "accelerator.backward(loss) on a loss that reads {name}."
)


class ShownGradients(NormsOfShown):
    """Stand-ins for the gradients of one rank's parameters, between a reduction and what follows it.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        counted: Chooses the elements of a parameter that this rank counts in its norm, whichever stage owns it.
        waiting: Context for waits on other ranks.
        settings: Settings of this rank's optimizers.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        counted: CountRule,
        waiting: Callable[[str], AbstractContextManager[None]],
        settings: OptimizerSettings,
    ) -> None:
        super().__init__(dict(parameters), mesh, counted, Shards(ledger, parameters, mesh, waiting), waiting)
        self.factors = StageFactors(mesh, settings)
        self._flat: dict[str, FlatGradient] = {}
        self._cleared: set[str] = set()  # whose gradients in parts user code has dropped since the last reduction
        self._noted: list[tuple[Tensor, int]] = []  # the optimizer's parts of gradients, and their versions
        self._zero: ZeroPartition | None = None
        self._active = False
        self._between = False
        self._stepped: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []  # what a step took away, and left
        self._has_stepped = False
        self._stands = StandIns(self._stand_for)
        self._touched = False
        in_parts = mesh.shape.sp_size > 1  # each rank has what its part of a sequence gives
        with_others = mesh.shape.ep_size > 1  # experts have what tokens of all replicas that share them give
        self._summands = frozenset(
            name
            for name, entry in ((n, ledger.entries[n]) for n in parameters)
            if in_parts or len(entry.holders) > 1 or (with_others and entry.spec is not None)
        )
        answer_norms_of_nothing(self)

    # -- what parts ask ------------------------------------------------------------------------------------------

    def taken(self, names: Sequence[str]) -> None:
        """Note that user code takes numbers of gradients, perhaps to add them up."""
        for name in names:
            if name in self._parameters and not self._between:
                self.factors.take(name, functools.partial(self._power_now, name))

    def _power_now(self, name: str) -> Tensor | None:
        gradient, flat = self._parameters[name].grad, self._flat.get(name)
        if gradient is None:
            return None
        part = gradient.part if isinstance(gradient, SharedGradient) else flat
        values = gradient.changed if isinstance(gradient, SharedGradient) else gradient
        if part is None:
            return self.power(name, self._parameters[name], plain_of(gradient), 2.0)
        return part.power(2.0, values)

    def compare_factors(self) -> None:
        """Compare, before a step, the factors of the stages (see `StageFactors`)."""
        if self._active and not self._has_stepped:
            with self._waiting("waits for what the other stages multiplied their gradients with"):
                self.factors.settle(self._power_now)

    @torch.no_grad()
    def gather(self, shard: FlatShard) -> None:
        """Gather the whole gradients of a buffer's parameters; collective over the ranks that share it."""
        zero = self._zero
        if zero is None:
            return
        mine = shard.master.grad if shard.master.grad is not None else torch.zeros_like(shard.master)
        mine = mine.to(shard.shard.device)
        flat = mine
        if shard.sharers is not None:
            with self._waiting("waits for the other parts of a gradient that user code reads"):
                flat = all_gather_new(mine, shard.sharers).view(-1)
        for name, param, start in zip(shard.bucket.names, shard.bucket.params, shard.bucket.offsets, strict=True):
            self._flat[name].gathered = flat[start : start + param.numel()].view_as(param).to(param.dtype)

    def norm_of_nothing(self, norm_type: float) -> Tensor | None:
        """While gradients are shown, the model's norm on a stage that has none of them; otherwise None."""
        return super().norm_of_nothing(norm_type) if self._active else None

    # -- when ----------------------------------------------------------------------------------------------------

    def partition(self, zero: ZeroPartition) -> None:
        """Note that the optimizer has the gradients of some parameters in parts from now on."""
        self._zero = zero
        for shard in zero.shards:
            for position, (name, param) in enumerate(zip(shard.bucket.names, shard.bucket.params, strict=True)):
                self._flat[name] = FlatGradient(name, param, (shard, position), self)

    def show(self) -> None:
        """Show the reduced gradients to user code, which may change them."""
        self._active, self._has_stepped = True, False
        self.factors.begin()
        self.note_parts()
        absent = self._absent
        for name, flat in self._flat.items():
            flat.gathered = flat.pending = flat.opened = None
            if name not in absent:
                flat.parameter.grad = SharedGradient.of(flat.parameter, flat, self)
        if self._flat:
            self._stands.forget()  # of replicas that had gradients of their own until now
        if self._mesh.model_group is not None:
            self._show_local()
            for name, stand in self._stands.named().items() if self._summands else ():
                if isinstance(stand.part, LocalGradient) and name in self._summands:
                    stand.part.is_summand = False
        self._stands.forget()  # they would keep the gradients of a step that is over
        self._cleared = set()

    def _show_local(self) -> None:
        """Put stand-ins in the place of gradients that are here."""
        besides = self._flat if self._active else {}
        here = {n: p for n, p in self._parameters.items() if n not in besides} if besides else self._parameters
        self._stands.put(here)

    def _stand_for(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> SharedGradient:
        part = LocalGradient(name, parameter, gradient, self)
        part.is_summand = self._between and name in self._summands
        return SharedGradient.of(parameter, part, self)

    def touch(self) -> None:
        """Note that a gradient is opened, or that autograd adds to it."""
        self._touched = True

    @property
    def _absent(self) -> frozenset[str]:
        """Names of parameters with parts that have no gradient on any rank."""
        return self._zero.absent_names if self._zero is not None else frozenset()

    @property
    def is_between(self) -> bool:
        """Whether user code stands between two batches of a step."""
        return self._between

    def _parts(self) -> ZeroPartition | None:
        """The partition that has gradients in parts now; between two batches every replica has its own gradients whole."""
        return None if self._between else self._zero

    def show_between(self) -> None:
        """Show gradients between two batches of a step: norms that user code takes are those of all stages, of this replica."""
        self._between = True
        self._show_local()

    def take_between(self) -> None:
        """Take back the gradients that were shown between two batches, as user code left them: later batches add to them."""
        if not self._between:
            return
        self._between = False
        touched, self._touched = self._touched, False
        for parameter in self._stands.take(touched=touched):
            _take(parameter)
        if touched:
            self._stands.forget()

    def join_parts(self, holders: Mapping[int, int]) -> None:
        """Give gradients that an earlier step left in the optimizer's parts back to the parameters; collective if there are any.

        Args:
            holders: Id of a parameter -> how many stages hold it: they add up what each has.
        """
        shards = [
            shard for shard in (self._zero.shards if self._zero is not None else ()) if shard.master.grad is not None
        ]
        for shard in shards:
            self.gather(shard)
            shard.master.grad, shard.absent = None, []
        absent = self._cleared | self._absent
        for name, flat in self._flat.items() if shards else ():
            left, flat.gathered = flat.gathered, None
            if left is not None and name not in absent:
                gradient = flat.parameter.grad
                left = left / holders[id(flat.parameter)]
                flat.parameter.grad = left if gradient is None else gradient.add_(left)

    def note_parts(self) -> None:
        """Note the optimizer's parts of gradients as they are now, which is right."""
        parts = [shard.master.grad for shard in self._zero.shards] if self._zero is not None else []
        self._noted = [(part, version_of(part)) for part in parts if part is not None]

    def _refuse_changed_parts(self) -> None:
        """Refuse changes of the flat parts that `optimizer.param_groups` holds under ZeRO: they came of one rank's parts alone.

        Raises:
            UnsupportedError: Somebody changed them.
        """
        noted, self._noted = self._noted, []
        if any(version_of(part) != version for part, version in noted):
            raise UnsupportedError(
                "gradients of optimizer.param_groups were changed between the backward pass and the step with zero.stage above "
                "0: there the optimizer has flat parts of all parameters, each rank others, so that a norm or a row of them is "
                "not that of a parameter. Change the gradients of model.parameters() instead, whose norms and shapes are whole."
            )

    def lay_open(self) -> None:
        """Gather partitioned gradients at once, so that one rank alone may look at them; collective."""
        if not self._active or self._zero is None:
            return
        for shard in self._zero.shards:
            self.gather(shard)
        if self._mesh.model_group is None:
            for flat in self._flat.values():
                if type(flat.parameter.grad) is SharedGradient:
                    flat.parameter.grad = flat.gathered

    def take_back(self, *, before_backward: bool = False) -> list[nn.Parameter]:
        """Bring the gradients that user code left in place of the stand-ins to where the optimizer finds them.

        Args:
            before_backward: Gradients that autograd has added meanwhile are to be reduced with those that follow.

        Returns:
            Parameters whose gradients are as they were shown or as user code made them, but nothing has arrived.
        """
        if not self._active:
            return []
        self._active = False
        self._refuse_changed_parts()
        settled: list[nn.Parameter] = []
        taken: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []
        if not before_backward:
            self._refuse_own_arrivals()
            self._give_room()
        for name, parameter in self._parameters.items():
            gradient, flat = parameter.grad, self._flat.get(name)
            if flat is not None:
                parameter.grad = None
                self._return(flat, gradient, before_backward)
                if (
                    gradient is not None
                    and type(gradient) is not SharedGradient
                    and self._may_arrive(flat, before_backward)
                ):
                    parameter.grad = gradient
            elif type(gradient) is SharedGradient:
                _take(parameter)
                if not getattr(gradient.part, "arrived", False):
                    settled.append(parameter)
            elif gradient is not None and self._mesh.shape.pp_size > 1:  # assigned: stages add up what arrives only
                settled.append(parameter)
            if type(gradient) is SharedGradient and gradient.changed is None:
                taken.append((parameter, parameter.grad, gradient))
            elif flat is not None and gradient is not None and parameter.grad is None:  # laid open, or assigned
                taken.append((parameter, None, plain_of(gradient)))
        self._stepped = [] if before_backward else taken
        if self._zero is not None and self._cleared and not before_backward:
            self._zero.dropped(self._cleared)
        return settled

    def show_after_step(self) -> None:
        """Show gradients again after a step, until they are cleared: user code finds and clears them where they were."""
        stepped, self._stepped = self._stepped, []
        for parameter, left, stand in stepped:
            if parameter.grad is left:
                parameter.grad = stand
        self._active = self._has_stepped = bool(stepped)

    def cleared(self, set_to_none: bool) -> None:
        """Clear the gradients that parameters have or show, where the optimizer's, in parts, were cleared.

        Args:
            set_to_none: Argument of `zero_grad`.
        """
        for flat in self._flat.values():
            gradient = flat.parameter.grad
            shown = isinstance(gradient, SharedGradient) and gradient.part is flat
            if shown:  # also by what was gathered of it
                flat.outdate(kept=not set_to_none)
            if shown and flat.shard.master.grad is None:
                flat.parameter.grad = None
            elif not shown and gradient is not None:  # of the batches of this step, which are not reduced yet
                flat.parameter.grad = None if set_to_none else gradient.zero_()
        if not set_to_none:
            self.note_parts()  # they are zeros, which is right

    def _give_room(self) -> None:
        """Make gradients of the optimizer's parts for those that user code assigned after it had cleared them.

        Raises:
            UnsupportedError: It assigned a stand-in from before, whose values are gone.
        """
        for flat in self._flat.values():
            gradient, master = flat.parameter.grad, flat.shard.master
            if type(gradient) is SharedGradient:
                gradient.here()
            assigned = gradient is not None and (type(gradient) is not SharedGradient or gradient.changed is not None)
            if assigned and master.grad is None and gradient is not flat.gathered:
                master.grad = torch.zeros_like(master)

    def _may_arrive(self, flat: FlatGradient, before_backward: bool) -> bool:
        """Whether a gradient that is no stand-in is to be reduced with what follows.

        The first of a backward pass may be that of a parameter which only the loss reads. On stages a hook is called before it,
        and an assigned one takes the place of the optimizer's, if that has one.
        """
        return before_backward and (self._mesh.shape.pp_size == 1 or flat.shard.master.grad is None)

    def _refuse_own_arrivals(self) -> None:
        """Refuse gradients that user code assigned where no backward pass gave one: each replica may have another.

        Raises:
            UnsupportedError: Names a parameter that has one.
        """
        absent = self._absent
        for name, flat in self._flat.items():
            gradient = flat.parameter.grad
            assigned = gradient is not None and type(gradient) is not SharedGradient
            if assigned and name in absent:
                raise UnsupportedError(NEVER_REDUCED.format(name=name))

    def _return(self, flat: FlatGradient, gradient: Tensor | None, before_backward: bool) -> None:
        shard, piece = flat.shard, flat.shard.inside(flat.position)
        if gradient is None or (type(gradient) is not SharedGradient and self._may_arrive(flat, before_backward)):
            self._cleared.add(flat.name)
            flat.outdate()
            if piece is not None and shard.master.grad is not None and piece not in shard.absent:
                shard.master.grad[piece] = 0.0
                shard.absent.append(piece)
            return
        self._cleared.discard(flat.name)
        if piece is not None and piece in shard.absent:
            shard.absent.remove(piece)
        if type(gradient) is not SharedGradient:
            flat.take(gradient)
        elif gradient.changed is not None or flat.gathered is not None:
            flat.take(gradient.plain())
        flat.close()
        if flat.pending is not None:  # before a backward pass: it is reduced with what follows
            flat.parameter.grad = flat.pending
        flat.gathered = flat.pending = None

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Inside, gradients are where the optimizer finds them; afterwards user code sees them again."""
        between = self._between
        self.take_between()
        was = self._active
        stands = {n: p.grad for n, p in self._parameters.items() if was and type(p.grad) is SharedGradient}
        self.take_back()
        try:
            yield
        finally:
            if was:
                self._show_again(stands)
            if between:
                self.show_between()

    def _show_again(self, stands: Mapping[str, Any]) -> None:
        self._active = True
        self.note_parts()
        absent = self._absent  # on all ranks: one may have no part
        for name, parameter in self._parameters.items():
            flat, stand = self._flat.get(name), stands.get(name)
            if flat is not None:
                if flat.shard.master.grad is None or name in absent:
                    continue
                fresh = stand is None or stand.changed is not None
                parameter.grad = SharedGradient.of(parameter, flat, self) if fresh else stand
            elif stand is not None and parameter.grad is not None:
                same = stand.changed is None and stand.part.tensor() is parameter.grad
                parameter.grad = stand if same else self._stand_for(name, parameter, parameter.grad)


def _take(parameter: nn.Parameter) -> None:
    """Put what a stand-in stands for in its place."""
    stand = parameter.grad
    if type(stand) is not SharedGradient:
        return
    parameter.grad = stand.plain()
    stand.part.close()
