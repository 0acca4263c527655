"""Sums, averages and clips gradients between the last backward pass and the optimizer step, as the ledger says.

Shared parameters are summed over the pipeline ranks that hold them, everything is reduced over dp once per optimizer step, and
the global norm counts every element of the full model exactly once, whatever the mesh. With ZeRO the gradients end up
in the flat parts that the optimizer updates, and the model's parameters have none after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.compat.private_torch import queue_after_backward
from hf_parallel.compat.torch_tools import scale_all
from hf_parallel.data_parallel.fsdp_parts import local_of
from hf_parallel.data_parallel.loss_numbers import NUMBERS
from hf_parallel.data_parallel.replica_wire import ReplicaSettings
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.engine.gradients.changed_parts import ChangedParts
from hf_parallel.engine.gradients.counted import Counted
from hf_parallel.engine.gradients.global_norm import GlobalNorm
from hf_parallel.engine.gradients.optimizer_states import OptimizerStates
from hf_parallel.engine.gradients.prepared_weights import PreparedWeights
from hf_parallel.engine.gradients.told import ToldOverParts
from hf_parallel.engine.gradients.trained_buckets import TrainedBuckets
from hf_parallel.guards.gradients.arrivals import Arrivals
from hf_parallel.guards.gradients.hooks import HookGuard, of_one_pass
from hf_parallel.guards.gradients.showing import ShownGradients
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.guards.weights.replicas_alike import AlikeReplicas
from hf_parallel.guards.weights.scaled_shards import ScaledShards
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.monitor.recorder import Recorder


DEFAULTS = ReplicaSettings()


class GradientSync:
    """Reduces and clips the gradients of one rank's parameters.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter (a shard where the entry has a spec).
        mesh: This rank's mesh. Building the groups of shared parameters is collective.
        settings: Settings of the reduction over replicas.

    Attributes:
        settings: Settings of the optimizers.
        weights: Weights that the model was prepared with.
        changed_parts: Finds changes of the parts of gradients that a rank has.
        begins_step: Whether no forward pass was made since the last step.
        updates: Steps that optimizers have begun; alike on the ranks of a model copy.
        states: View of the optimizers' states for user code.
        in_window: Whether the last backward pass was not the last of its step.
        given_away: Whether the last backward pass was `torch.autograd.grad`, which leaves no gradients here.
        buckets: The buckets in which gradients are reduced.
        scaled: Numbers by which user code multiplies shards of weights between updates.
        total_norm: Norm of the full model's gradient, whatever is shown of it.
        before_write: Called when an optimizer is about to write to the parameters.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        settings: ReplicaSettings = DEFAULTS,
    ) -> None:
        self.ledger = ledger
        self.parameters = dict(parameters)
        self.mesh = mesh
        partitions = settings.zero.stage > 0 and mesh.dp_shard_group is not None
        self._counted = Counted(ledger, mesh, replicas_add_up=partitions)
        # `fully_shard` reduces in every backward pass, and adds to what is reduced itself.
        self.arrivals = Arrivals(list(self.parameters.values()) if settings.sharded is None else [])
        self.weights = PreparedWeights(ledger, self.parameters, settings.sharded, lambda: self.in_window)
        self._num_holders = {id(p): len(ledger.entries[name].holders) for name, p in self.parameters.items()}
        self.in_window = self.given_away = False
        self.begins_step = True
        self.before_write: Callable[[], None] | None = None
        self.changed_parts = ChangedParts(self._power_of_parts, mesh.shape.tp_size)
        self.settings = OptimizerSettings(mesh, parameters)
        self.shown = ShownGradients(ledger, parameters, mesh, self._counted.of_stage, settings.waiting, self.settings)
        self.hooks = HookGuard(ledger, parameters, mesh, self.shown.shards.assemble)
        groups = {holders: mesh.holders_group(holders) for holders in ledger.shared_holders()}
        self.groups = {holders: group for holders, group in groups.items() if mesh.pp_rank in holders}
        self.replicas = Replicas(ledger, parameters, mesh, settings, self._counted.of_model, self._alike)
        self.scaled = ScaledShards(ledger, self.parameters, mesh, lambda: self.replicas.arriving)
        self.shown.numbers.note_part = self.scaled.note
        self.updates = 0
        self.states = OptimizerStates(ledger, self.parameters, self.replicas)
        self.told = ToldOverParts(mesh, self.parameters.values(), self.settings, self.replicas)
        self.total_norm = GlobalNorm(self.parameters, mesh, self._counted, self.replicas, self.told, self.shown)
        self.replicas.before_reading += [self.states.settle, self.changed_parts.judge, self.told.settle]
        self.buckets = TrainedBuckets(
            *(ledger, self.parameters, mesh), groups=self.groups, replicas=self.replicas, waiting=settings.waiting
        )

    def _alike(self, named: Sequence[tuple[str, nn.Parameter]], ranks: dist.ProcessGroup) -> AlikeReplicas:
        return AlikeReplicas(named, ranks, self.settings)

    def begin_forward(self) -> None:
        """Prepare a training forward pass, whose weights must be those prepared.

        Raises:
            UnsupportedError: Names a parameter or a module that was replaced since the model was prepared.
        """
        self.weights.begin_forward()
        if self.in_window and self.replicas.reduces_every_backward and self.mesh.shape.pp_size == 1:
            self.hooks.refuse_accumulated()  # on stages they are asked when they run
        if self.total_norm.has_parts and self.begins_step:
            # Once: replicas may cut their rows into other numbers of batches. Gradients that are left are added to.
            self.begins_step = False
            NUMBERS.note(float(any(owner.grad is not None for owner in self._owners())))
        if self.replicas.sharded is not None:
            self.buckets.follow_freezing()  # before messages of which `fully_shard` would send others
            self.replicas.sharded.begin_forward()

    def look_at_hooks(self) -> None:
        """Adapt the hooks on parameters, and let this rank tell others which need gradients that they gather."""
        self.hooks.check()
        self.settings.hooked = self.hooks.gathered

    def refuse_replaced(self) -> None:
        """Refuse to gather weights that are not those that were prepared.

        Raises:
            UnsupportedError: Names a parameter or a module that was replaced since.
        """
        self.weights.check_objects()

    def summands(self, name: str) -> int:
        """Number of stages that have a part of a parameter's gradient now, which `reduce` adds up."""
        return self._num_holders[id(self.parameters[name])] if self.shown.is_between else 1

    def begin_backward(self, *, is_first: bool = False) -> None:
        """Set reduced gradients aside before backward passes, so that what these add can be told from them.

        Args:
            is_first: Whether they are the first of their step, and begin before the caller's own.
        """
        self.total_norm.foresee(None)
        if self.settings.rates is not None:
            self.settings.rates.look(self.updates)
        if self.replicas.sharded is not None:
            self.replicas.sharded.begin_backward()
        self.shown.take_between()
        for parameter in self.shown.take_back(before_backward=True):
            self.arrivals.note(parameter)
        self.arrivals.set_aside(everything=is_first)

    def end_schedule(self) -> None:
        """Hide gradients made inside a forward call: the caller sees none before its own backward."""
        self.arrivals.hide()

    def begin_callers_backward(self) -> None:
        """Show the gradients that `end_schedule` hid: the caller backpropagates a loss."""
        self.arrivals.show()

    def take_reduced(self, name: str) -> torch.Tensor | None:
        """The gradient that earlier passes of this step left reduced: it arrives again, with what a hook makes of it.

        Raises:
            UnsupportedError: Replicas have averaged it.
        """
        parameter, zero = self.parameters[name], self.replicas.zero
        reduced = self.arrivals.take_aside(parameter)
        mine = [s for s in zero.shards if any(p is parameter for p in s.bucket.params)] if zero is not None else []
        averaged = reduced is not None and self.mesh.shape.num_copies > 1
        if averaged or any(shard.master.grad is not None for shard in mine):
            raise of_one_pass(name)
        return reduced

    def arm(self, factor: float | None, *, last: bool) -> None:
        """Allow gradients to leave in the next backward pass while it runs.

        Args:
            factor: Factor that `reduce` or `accumulate` will be given after it; None if that is not known yet.
            last: Whether it is the last of its step.
        """
        if self.buckets.are_current and not self.arrivals.has_assigned:
            self.replicas.arm(factor, last=last)

    def accumulate(self, factor: float) -> None:
        """End a backward pass that is not the last of its step."""
        self.in_window = True
        if self.replicas.reduces_every_backward:
            self.buckets.sum_over_stages()
            self.replicas.accumulate(factor)
            if self.replicas.zero is not None:  # stage 2 has taken them: user code between two batches sees them again
                self.shown.show()
        elif self.replicas.sharded is None:
            self._join()
            if self.mesh.model_group is not None or self.mesh.shape.sp_size > 1:
                self.shown.show_between()

    @torch.no_grad()
    def _join(self) -> None:
        """Add the gradients of the step before, where nobody has cleared them, to those of this step."""
        self.arrivals.join(self._num_holders)
        self.shown.join_parts(self._num_holders)

    def reduce(self, factor: float) -> None:
        """End the last backward pass of a step: gradients become `factor` x their sum over holders, averaged over dp.

        What was reduced before, in an earlier pass of the same step, is added as it is.

        Raises:
            UnsupportedError: A parameter was unfrozen after ZeRO partitioned the optimizer.
        """
        self.in_window = False
        with self.buckets.trained_so_far():
            if self.mesh.shape.num_copies > 1 and self.arrivals.has_assigned and factor != 0.0:
                with torch.no_grad():
                    self.arrivals.join(self._num_holders, factor)
            self.buckets.sum_over_stages()
            self.replicas.reduce(factor)
        self.total_norm.scale_foreseen(factor)
        zero, sharded = self.replicas.zero, self.replicas.sharded
        self.arrivals.settle(shard.master for shard in (zero.shards if zero is not None else ()))
        if sharded is not None:
            self.arrivals.settle(self.parameters.values())
            if self.mesh.model_group is not None:
                queue_after_backward(
                    self.changed_parts.remember
                )  # after `fully_shard` has put its last gradients there
        else:
            self.shown.show()

    def _power_of_parts(self) -> torch.Tensor:
        return self.total_norm.power_of(
            [local_of(p.grad) for p in self.parameters.values() if p.grad is not None], 2.0
        )

    @property
    def recorder(self) -> Recorder:
        """Records when this rank does what."""
        return self.replicas.recorder

    def norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of the full model's gradient (0-d, float32), equal on every rank of a model copy.

        Args:
            norm_type: p of the p-norm, above 0; `inf` for the largest magnitude.
        """
        self.arrivals.put_back()
        with self.shown.withdrawn():
            return self.total_norm.of(norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        The coefficient is that of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.
        """
        # A rank that does not clip meets the others in its step.
        NUMBERS.note_change("clip_grad_norm_", (max_norm, norm_type))
        self.arrivals.put_back()
        with self.shown.withdrawn():
            norm = self.total_norm.of(norm_type)
            if max_norm != float("inf"):
                self._scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _scale(self, factor: torch.Tensor) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in self._gradients():
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            scale_all(gradients, factor.to(device))
        self.arrivals.note_all()
        self.changed_parts.remember_again()

    def _owners(self) -> Iterator[torch.Tensor]:
        yield from (shard.master for shard in (self.replicas.zero.shards if self.replicas.zero is not None else ()))
        yield from self.parameters.values()

    def _gradients(self) -> list[torch.Tensor]:
        """Every gradient on this rank: of parameters, and of the optimizer's parts."""
        return [local_of(owner.grad) for owner in self._owners() if owner.grad is not None]

    def before_update(self) -> None:
        """Take over what user code made of the gradients, before a loss scaler or an optimizer looks at them.

        Raises:
            UnsupportedError: Names a parameter that was replaced, or has another shape.
        """
        self.weights.check()
        self.settings.use()
        self.shown.compare_factors()
        self.shown.take_back()
        self.states.settle()

    def compare_replicas(self) -> None:
        """Compare what the last updates have left where ranks update by themselves what others have, or parts of it; collective.

        Raises:
            RankMismatchError: Names a setting or a weight that differs, on each of the ranks that should have the same, or the
                gradients or weights that ranks have changed by different numbers.
        """
        self.shown.numbers.compare()
        for compared in self.replicas.compared:
            compared.compare()
        self.scaled.compare()  # of replicas that are alike by now
        if self.replicas.sharded is not None:
            self.told.compare_weights(self.replicas.sharded.device)
