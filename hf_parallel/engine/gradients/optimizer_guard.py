"""Follows the steps of one optimizer: what it may update, and with which gradients."""

from __future__ import annotations

import torch
from torch import nn

from hf_parallel.engine.gradients.optimizer_rules import (
    cut_states,
    drop_others,
    refuse_crossing_now,
    refuse_crossing_updates,
    refuse_updates_in_backward,
    refuse_whole_tensor_updates,
    watch_later_steps,
)
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.optimizers.crossing import keeps_by_place
from hf_parallel.guards.optimizers.stepping import OwnHooks, clears_both
from hf_parallel.guards.rates import RatesOfModules


class OptimizerGuard:
    """Makes an optimizer refuse to step on gradients that were never reduced, and keep only live parameters.

    Args:
        optimizer: The optimizer.
        gradients: Reduction of the gradients of this rank's parameters.
        model: Model whose parameters it updates, if its forward passes go through an engine.

    Attributes:
        own_hooks: What to tell when a step begins.

    Raises:
        UnsupportedError: The optimizer's update needs whole tensors but some of its parameters are shards, or needs all
            parameters but each stage has others.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: GradientSync, model: nn.Module | None = None
    ) -> None:
        self._optimizer, self._gradients = optimizer, gradients
        refuse_updates_in_backward(optimizer, gradients.mesh)
        self.own_hooks = OwnHooks(optimizer, self._refuse_late)
        if gradients.mesh.parts.size > 1:
            cut_states(optimizer, self._name_now, gradients.ledger, gradients.mesh)
        gradients.replicas.take_over(optimizer)
        has_own_list = keeps_by_place(optimizer)
        pairs = drop_others(optimizer, gradients.parameters.values()) and has_own_list
        self._refuse_whole_tensor_updates()
        refuse_crossing_updates(optimizer, gradients.parameters, gradients.mesh, pairs=pairs)
        watch_later_steps(optimizer, gradients.mesh)
        if model is not None and not gradients.weights.are_watched:
            gradients.settings.rates = RatesOfModules(model)
            gradients.weights.watch(model)
        self._follow(model)
        self.own_hooks.settle()
        gradients.settings.add(optimizer)

    def _follow(self, model: nn.Module | None) -> None:
        """Put hooks on the steps, in the order in which they run."""
        optimizer, gradients = self._optimizer, self._gradients
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_step_post_hook(lambda *args: gradients.shown.show_after_step())
        gradients.replicas.adopt(optimizer, model)
        optimizer.register_step_post_hook(lambda *args: gradients.scaled.remember())  # once parts of others have come
        # After all that this rank can refuse by itself, which says more.
        optimizer.register_step_pre_hook(lambda *args: gradients.total_norm.tell_before(optimizer))
        if gradients.replicas.zero is not None:
            gradients.shown.partition(gradients.replicas.zero)
            gradients.states.guard(optimizer)
            clears_both(optimizer, gradients.shown.cleared)

    def _name_now(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter, or of what the model has in its place now."""
        sharded = self._gradients.replicas.sharded
        here = parameter if sharded is None else sharded.now(parameter)
        return next((name for name, one in self._gradients.parameters.items() if one is here), None)

    def _refuse_late(self) -> None:
        self._refuse_whole_tensor_updates()
        refuse_crossing_now(self._optimizer, self._gradients.mesh)

    def _refuse_whole_tensor_updates(self) -> None:
        gradients = self._gradients
        partitions = gradients.replicas.partitions
        shares = {"partitions": partitions, "gathers": partitions and gradients.replicas.sharded is None}
        refuse_whole_tensor_updates(self._optimizer, gradients.ledger, gradients.parameters, gradients.mesh, **shares)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        gradients, zero = self._gradients, self._gradients.replicas.zero
        gradients.updates += 1
        gradients.before_update()
        gradients.changed_parts.refuse_changes()
        gradients.states.guard(optimizer)
        left = zero is not None and any(p.grad is not None for shard in zero.shards for p in shard.bucket.params)
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if gradients.replicas.sharded is not None:
            # `fully_shard` has averaged them all the same: the step would be another one than asked for.
            left = gradients.in_window or gradients.given_away
        if left or not gradients.arrivals.use(updated):
            raise UnsupportedError(
                "optimizer.step() was called on gradients that were never reduced: the loss did not come from the "
                "parallelized model's forward, torch.autograd.grad gave them, backward ran while gradients were still "
                "accumulating, or a callback's own backward came after those of the step were reduced, with zero.stage above 0 and "
                "pp_size above 1 (run it in on_step_begin, or add to p.grad what it gives), or step(closure) computed them, with zero.stage 2 "
                "(call the closure before the step). Call "
                "accelerator.backward(loss) on model(**batch), and step when accelerator.sync_gradients is true and outside of "
                "no_sync(). For steps that replicas take by themselves set local_sgd.sync_every."
            )
        gradients.arrivals.put_back()  # of a forward pass without a backward pass
        gradients.told.updates()
        if gradients.before_write is not None:
            gradients.before_write()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        gradients = self._gradients
        gradients.begins_step = True
        gradients.told.updated()
        gradients.settings.look_at_states()
        for compared in gradients.replicas.compared:
            compared.updated()
